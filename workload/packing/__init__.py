"""What fits where: memory of pieces, rules, units that are placed as one, and options that
tables may have. `pack.pack` finds any plan.
"""

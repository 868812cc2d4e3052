"""Tasks: tables, devices with links between them, the objective, and rules that plans must keep.

Constraint files become rules.
"""

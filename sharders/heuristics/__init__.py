"""Greedy plans: by sizes and lookups, by costs of tables alone or fused, in halves or in grids
of limits. They place columns only.
"""

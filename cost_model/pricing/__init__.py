"""Prices shards, plans and partial plans by a cost model, with what is uncertain about them.

`oracle.EstimatedCosts` is the entry point.
"""

"""Weights and optimizer states of sharded models: loaded, saved, and moved to another plan.

`table_parts` says which part of a table a tensor of a sharded model is, under any plan.
"""

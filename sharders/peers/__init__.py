"""Sharders of others, reimplemented for comparison: NeuroShard, and simulated annealing with
minutes. TorchRec's planner is in `integration`.
"""

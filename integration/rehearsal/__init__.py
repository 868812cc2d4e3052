"""Rehearsals: training a small TorchRec model by a plan, to measure real training steps.

`RankGroup` in `rank_group` starts the ranks; what they measure is in `benchmark.rehearsals`.
"""

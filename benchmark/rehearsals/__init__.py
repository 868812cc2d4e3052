"""Measurements of rehearsals: traces of ranks, times of steps, and rounds kept in the store.

Ranks that train are in `integration.rehearsal`, since TorchRec trains them.
"""

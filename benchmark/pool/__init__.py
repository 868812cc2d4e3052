"""Benchmark actors of a Ray cluster, each pinned to a device, and the pool that hands shards to
them. What they measure goes to the store.
"""

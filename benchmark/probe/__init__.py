"""A probe of a machine in seconds: bandwidths and latencies of its caches and memory, and a few
shards. A cost model of other machines is fitted to its report.
"""

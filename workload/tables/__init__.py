"""Tables, pieces of them, shards of pieces, and the operator that runs a shard.

Nothing here knows devices.
"""

"""`AutoShardPlanner` in the place of TorchRec's planner, and `plan`, a plan in one call.

`tables` tells which tables of a model have prices, `limits` turns TorchRec's constraints into
rules, `problem` makes the task of a topology, and `rest` plans what has no price.
"""

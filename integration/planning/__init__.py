"""`AutoShardPlanner` in the place of TorchRec's planner, and `plan`, a plan in one call.

`tables` selects the tables of a model that have a predicted cost, `limits` turns TorchRec's
constraints into rules, `problem` reads devices and links from a topology, and `rest` plans the
tables without a predicted cost.
"""

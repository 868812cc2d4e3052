"""TorchRec models as they come in: their tables, what batches look up in them, and types by name.

`tables_of` in `tables` makes a task's tables and operator options of a model.
"""

"""Plans to TorchRec and back, with hot rows and slower memory, and both planners inside each other.

A plan decides how tables are sharded; what is in them is moved by `checkpoints`.
"""

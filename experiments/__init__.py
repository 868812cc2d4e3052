"""What people run. Each script parses a typed config, calls the rooms below and logs to MLflow.

May import every other room; none imports this one.
"""

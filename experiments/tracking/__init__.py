"""Results that outlive a command: runs and models in MLflow, folders in object stores.

It imports nothing of experiments but the console.
"""

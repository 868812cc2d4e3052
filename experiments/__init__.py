"""The commands: each parses a typed configuration, calls the other packages, and logs to MLflow.

This package may import every other one; none imports it.
"""

"""Command lines of all commands: options, errors, progress, time budgets, and Ray clusters."""

"""Rehearsals: training a small TorchRec model by a plan, to measure real training steps."""

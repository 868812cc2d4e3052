"""Hyperparameter sweeps with Ray Tune: options, search space, trials, logging, the winner."""

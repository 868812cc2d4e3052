"""The policy: its network, its RLModule, its files, rollouts of large tasks in groups, and the
sharder. Training is in `experiments.training`.
"""

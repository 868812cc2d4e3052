"""Training of policies with PPO: options, loop, run folder, updates of the cost model, report."""

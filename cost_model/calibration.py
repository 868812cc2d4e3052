"""Few-shot calibration: a model of one machine that tells the costs of another.

Another machine, batch size or type of weights changes what each kind of work costs, and hardly
how tables differ or how they fuse. So only the prices of work and the cost of starting an
operator are learned anew, from a few dozen shards, and held near where they were.
"""

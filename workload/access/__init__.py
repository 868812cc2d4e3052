"""How rows of tables are looked up: reuse in a batch, shares of hot rows, hits of caches,
recorded lookups. Features of cost models follow from it.
"""

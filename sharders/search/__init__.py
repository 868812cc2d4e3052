"""Local search: steps between plans, options of tables among them, and what a search begins with.

`local_search.TaskSearch` is its loop.
"""

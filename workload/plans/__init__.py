"""Plans: pieces of tables, their devices and options; checks, moves between plans, and their
price in steps. The oracle and sharder protocols are here, too.
"""

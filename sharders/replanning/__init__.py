"""Plans that follow one in use: near it, for another number of devices, after a drift of lookups.

They count what has to move.
"""

"""Neural networks that price a set of tables on a device, their inputs, and data to train them.

A set enters as the sum of what its tables add.
"""

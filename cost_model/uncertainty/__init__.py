"""Uncertainty of the cost of tables: residuals that measurements correct, and scenarios of them.
A scenario has one factor for each table, wherever it is.
"""

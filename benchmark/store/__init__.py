"""The store of measurements, a file of SQLite, and its copies as Parquet files.

What was measured once, with the same hardware and versions, is not measured again.
"""

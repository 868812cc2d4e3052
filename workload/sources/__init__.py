"""Where tables come from: files of several formats, families of published models, synthetic ones.

`readers.load_tables` reads them all.
"""

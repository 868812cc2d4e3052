"""Trains and fits what cost models consist of: networks, calibrations, links, overheads of
training. Nothing here is loaded to plan by a model that is there.
"""

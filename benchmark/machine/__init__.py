"""The machine that measures: its hardware, limits of its containers, processes, and locks of
devices. It knows neither operators nor Ray.
"""

"""Comparisons of sharders: task sets, planning, measuring, the posterior of step times, reports."""

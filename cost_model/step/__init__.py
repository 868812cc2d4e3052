"""Costs of a training step beside fused operators: of each device, and equal on all devices.

`common_price.CommonPrice` puts it together for a plan, and for options of single tables.
"""

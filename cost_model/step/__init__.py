"""What a step of training takes beside fused operators, on its device and on all devices alike.

`common_price.CommonPrice` puts it together for a plan, and for options of single tables.
"""

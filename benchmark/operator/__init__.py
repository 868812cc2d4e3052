"""The fused operator of FBGEMM, exchanges of its outputs, and how long they take on a device.

Everything here runs in the process that calls it.
"""

"""Triton kernels, one file per operation; `ref/NAME.py` is the torch twin and the specification of each.

matrix.py is none: it lays out weights for the products of a CPU.
"""

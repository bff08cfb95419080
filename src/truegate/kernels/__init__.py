"""Triton kernels, one file per operation; `ref/NAME.py` is the torch twin and the specification of each.

A file whose twin has another name says which. launch.py, matrix.py, sizes.py and tuning.py hold no operation.
"""

"""Triton kernels, one file per operation; `ref/NAME.py` is the torch twin and the specification of each."""

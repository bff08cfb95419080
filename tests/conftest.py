"""Triton decides at its first import whether kernels are interpreted, and any test may be the first to import it."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

"""Truegate: every token reaches the experts its gate chose, at the weight its gate gave."""

__version__ = "0.1.0"

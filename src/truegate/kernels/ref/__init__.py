"""The torch twin of every kernel: what it must compute, written for reading."""

"""Kernels, one folder each."""

"""Kernels and copies on each device by itself."""

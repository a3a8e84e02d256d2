"""Factors between units: a millisecond has `NS_PER_MS` nanoseconds."""

from __future__ import annotations

# Floats, because times and energies are divided by them.
NS_PER_S = 1e9
NS_PER_MS = 1e6
S_PER_MIN = 60.0
MS_PER_S = 1e3
MJ_PER_J = 1e3

# Decimal, as vendors and nccl-tests count.
BYTES_PER_GB = 1e9
FLOP_PER_TFLOP = 1e12

# Binary, as sizes of buffers are given.
KIB = 2**10
MIB = 2**20
GIB = 2**30

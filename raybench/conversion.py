"""Factors between units, each defined once; `NS_PER_MS` nanoseconds are a millisecond."""

from __future__ import annotations

# Times and energies are floats, as they are divided by.
NS_PER_S = 1e9
NS_PER_MS = 1e6
MS_PER_S = 1e3
MJ_PER_J = 1e3

# Decimal, as vendors and nccl-tests count.
BYTES_PER_GB = 1e9
FLOP_PER_TFLOP = 1e12

# Binary and whole, as sizes of buffers are.
KIB = 2**10
MIB = 2**20
GIB = 2**30

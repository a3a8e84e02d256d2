"""Measure two versions in turns until each point is decided."""

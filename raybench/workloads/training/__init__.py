"""Models that are trained, or run forward."""

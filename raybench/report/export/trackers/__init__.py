"""Trackers that a run can be written to, a module each."""

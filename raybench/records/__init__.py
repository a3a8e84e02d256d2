"""Data that travels between the driver, the workers and the tables.

Durations of samples are integers in ns, sizes are bytes.
"""

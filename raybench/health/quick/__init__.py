"""A check of one node in seconds: without Ray, one process per device, each with deadlines."""

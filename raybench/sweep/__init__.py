"""A sweep: its rounds, its loop, and the rows of its run."""

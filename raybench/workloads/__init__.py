"""What is timed: the built-in workloads, and what one of your own is made with."""

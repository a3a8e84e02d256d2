"""The timed loop on one rank, and what takes its step apart."""

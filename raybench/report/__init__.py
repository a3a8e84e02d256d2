"""Text from the analysis; prints nothing."""

"""Training scripts of the user, run unchanged."""

"""The words of reports: one function for each kind of fact, made last."""

"""Files and trackers for other tools."""

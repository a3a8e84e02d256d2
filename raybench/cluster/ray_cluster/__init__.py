"""Workers on Ray: the only place that imports it."""

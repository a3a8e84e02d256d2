"""Health checks: tests of devices, links and nodes, their verdicts, and the report."""

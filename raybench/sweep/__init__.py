"""The loop of a run and its decisions; knows no screen."""

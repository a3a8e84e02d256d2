"""Analysis of the tables with pandas; pure."""

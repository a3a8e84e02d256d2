"""What is kept: the tables, their columns, written and read."""

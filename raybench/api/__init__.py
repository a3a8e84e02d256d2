"""The Python API of raybench, without the tables; the commands call the same functions."""

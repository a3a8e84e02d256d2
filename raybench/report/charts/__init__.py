"""Charts in files of their own."""

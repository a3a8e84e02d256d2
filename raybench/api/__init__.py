"""What `import raybench` offers beside the tables, on the functions that the commands call too."""

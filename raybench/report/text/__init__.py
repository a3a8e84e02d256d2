"""Reports for the terminal and in Markdown."""

"""Files for other programs, a module each."""

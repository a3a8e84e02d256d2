"""The metrics of a point, by subject: declared, computed and doubted in one file each."""

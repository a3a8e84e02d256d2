"""The version of raybench, which the package and its results take from here."""

__version__ = "0.1.0"

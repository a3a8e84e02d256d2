"""Measure two versions in turns until each point is decided.

* A gate is one comparison of two versions; it has a folder, from which it can be resumed.
* A side is the old or the new version.
* A start is one sweep of one side. A pair is a start of each side, one after the other.
* A look is a test whether a point is decided after so many pairs.
"""

"""Whether a cluster is fit to be measured: checks of its devices, nodes and variables."""

"""A diffusion transformer whose sequence the ranks divide."""

"""Statistics of samples: numpy and scipy only."""

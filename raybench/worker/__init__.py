"""One process that owns one device, its process group and its state."""

"""Training: packing, losses, sharding, the update."""

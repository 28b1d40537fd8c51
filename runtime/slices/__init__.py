"""A part of a model on this device: some units computed here, the others elsewhere."""

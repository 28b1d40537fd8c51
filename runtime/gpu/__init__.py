"""GPUs: which there are, what of a model lies on one, and how it gets there."""

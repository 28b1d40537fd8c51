"""GPUs: which there are, which part of a model lies on one, and how it gets there."""

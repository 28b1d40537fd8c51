"""A device that computes for the runs of others."""

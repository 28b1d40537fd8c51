"""This device's part in the runs of others."""

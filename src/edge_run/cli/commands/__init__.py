"""The commands that stand alone."""

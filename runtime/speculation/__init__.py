"""Guesses of what comes next, and the passes that verify them."""

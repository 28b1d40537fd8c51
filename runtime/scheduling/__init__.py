"""Decides which tokens of which requests go into the next pass; nothing here computes or waits."""

"""Vectors of texts: what is computed together, and what comes of it."""

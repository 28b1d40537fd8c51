"""Predictions put to the test: cold runs in processes of their own."""

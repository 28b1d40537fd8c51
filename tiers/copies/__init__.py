"""Copies of a model on other drives: checked, and read along with the model so that their bandwidths add up."""

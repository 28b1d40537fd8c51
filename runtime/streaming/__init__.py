"""Weights that come and go during a pass: in the order of the graph, or by expert."""

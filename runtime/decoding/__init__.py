"""Passes: the driver that follows the graph, the decoder, and what a conversation has in it."""

"""A device in a mesh: its state, its connection, orders, and commands that join, change and examine it."""

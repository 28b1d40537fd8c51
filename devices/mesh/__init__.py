"""A device in a mesh: its state, its connection to the broker, orders, and the commands that change and examine it."""

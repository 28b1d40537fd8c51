"""Keys and values: where cells lie, what of their room is lent, what is spilled to a file or saved."""

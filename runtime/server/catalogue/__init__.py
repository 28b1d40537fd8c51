"""The models that a server has: which there are, which one is open, and who waits for another one."""

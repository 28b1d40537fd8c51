"""What llama.cpp's graph is: its nodes, what flows through it, and where it can be cut."""

"""The engine: llama.cpp computing on memory that we own, inside a budget."""

"""llama.cpp and ggml: the binding, a model and its context, and what both are made for."""

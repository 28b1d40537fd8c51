"""The engine: a model under our memory, its graph map and program, the generate loop, the worker and the server."""

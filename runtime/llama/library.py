"""Which llama.cpp is installed; asked without loading it."""

from __future__ import annotations

import functools


@functools.cache
def library_version() -> str:
    """Return the installed llama-cpp-python, which names the llama.cpp build in it."""
    import importlib.metadata  # which takes long to load

    return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"

"""Which llama.cpp is installed; asked without loading it."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def library_version() -> str:
    """Return the installed llama-cpp-python, which names the llama.cpp build in it."""
    return f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}"

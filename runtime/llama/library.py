"""Which llama.cpp is installed; asked without loading it."""

from __future__ import annotations

import functools
from importlib.machinery import PathFinder
from pathlib import Path

_BEFORE, _AFTER = "llama_cpp_python-", ".dist-info"


@functools.cache
def library_version() -> str:
    """Return the installed llama-cpp-python, which names the llama.cpp build in it."""
    spec = PathFinder.find_spec("llama_cpp")  # also where a package without its code stands in for it
    places = spec.submodule_search_locations if spec and spec.submodule_search_locations else ()
    found = [folder.name for place in places for folder in Path(place).parent.glob(f"{_BEFORE}*{_AFTER}")]
    return f"llama-cpp-python {_version(found)}"


def _version(folders: list[str]) -> str:
    """Return the version that the name of the one folder beside the package says; else what Python finds out."""
    if len(folders) == 1:
        return folders[0].removeprefix(_BEFORE).removesuffix(_AFTER)
    import importlib.metadata  # which takes long to load, and longer to ask

    return importlib.metadata.version("llama-cpp-python")

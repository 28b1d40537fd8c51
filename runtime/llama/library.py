"""Which llama.cpp is installed; asked without loading it."""

from __future__ import annotations

import functools
from importlib.machinery import PathFinder
from pathlib import Path

_BEFORE, _AFTER = "llama_cpp_python-", ".dist-info"


@functools.cache
def library_version() -> str:
    """Return the installed llama-cpp-python, which names the version of llama.cpp in it."""
    found = [folder.name for place in _places() for folder in place.parent.glob(f"{_BEFORE}*{_AFTER}")]
    return f"llama-cpp-python {_version(found)}"


@functools.cache
def library_build() -> str:
    """Return the version with what tells one build of it from another: it computes at another speed, or other bits.

    That is by the sizes and times of the libraries' files.
    """
    files = [path.stat() for place in _places() for path in place.glob("lib/*") if _is_ours(path.name)]
    size_bytes, newest_ns = sum(file.st_size for file in files), max((file.st_mtime_ns for file in files), default=0)
    return f"{library_version()}, build of {size_bytes} bytes at {newest_ns}"


def _is_ours(name: str) -> bool:
    return "ggml" in name or "llama" in name


def _places() -> list[Path]:
    """Return the folders of the package."""
    spec = PathFinder.find_spec("llama_cpp")
    return [Path(place) for place in spec.submodule_search_locations or ()] if spec else []


def _version(folders: list[str]) -> str:
    """Return the version that the name of the one folder beside the package says; else what Python finds out."""
    if len(folders) == 1:
        return folders[0].removeprefix(_BEFORE).removesuffix(_AFTER)
    import importlib.metadata  # which takes long to load, and longer to ask

    return importlib.metadata.version("llama-cpp-python")

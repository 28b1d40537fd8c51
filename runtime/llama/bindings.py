"""llama-cpp-python's low-level bindings without the package around them.

`import llama_cpp.llama_cpp` runs the whole package first, with NumPy, Jinja and more: 11 MiB and a tenth of a second
that a run has other uses for. Here a package that is only a path stands in for it meanwhile, and leaves nothing behind:
who imports llama_cpp later gets all of it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

_PACKAGE = "llama_cpp"


def low_level() -> ModuleType:
    """Return the module `llama_cpp.llama_cpp`: the one that is imported already, if any. Raises ImportError."""
    name = f"{_PACKAGE}.{_PACKAGE}"
    if _PACKAGE in sys.modules:
        return importlib.import_module(name)
    spec = find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named '{_PACKAGE}'", name=_PACKAGE)
    bare = ModuleType(_PACKAGE)
    bare.__path__, bare.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules[_PACKAGE] = bare
    try:
        return importlib.import_module(name)
    finally:
        for loaded in [key for key in sys.modules if key.split(".")[0] == _PACKAGE]:
            del sys.modules[loaded]

"""The process that opens a model file first: `python -m edge_run.runtime.inspector_child`.

The request comes on standard input as JSON. The answer on standard output is `ok` and an `Inspection`, or `error` and
what to raise, each on a line of its own; a process that dies instead says that the file is to blame.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

MOST_DATA_BYTES = 4 << 30


def main() -> None:
    """Answer one request."""
    _limit()
    _skip_package_code("llama_cpp")
    request = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogateescape"))
    from edge_run.base.config import ModelConfig
    from edge_run.base.errors import EdgeRunError
    from edge_run.runtime.inspector import inspect_here

    try:
        config = ModelConfig(threads=1, **request["config"])
        answer, text = "ok", inspect_here(Path(request["path"]), config, Path(request["cache_folder"])).to_json()
    except EdgeRunError as error:
        answer, text = "error", json.dumps([type(error).__name__, str(error)])
    sys.stdout.write(f"{answer}\n{text}")
    sys.stdout.flush()
    os._exit(0)  # what is loaded need not be freed piece by piece


def _limit() -> None:
    """Keep a broken file from taking all memory, or leaving a core dump."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        for kind, most in ((resource.RLIMIT_DATA, MOST_DATA_BYTES), (resource.RLIMIT_CORE, 0)):
            hard = resource.getrlimit(kind)[1]
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _skip_package_code(name: str) -> None:
    """Let the modules of package `name` be imported without what the package itself imports: it takes longer."""
    if (spec := importlib.util.find_spec(name)) and spec.submodule_search_locations:
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package


if __name__ == "__main__":
    main()

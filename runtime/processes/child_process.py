"""What starting a child process of ours, limiting it from within, and telling its end have in common.

Children open unknown model files (`runtime/inspection/launcher.py`), and work on what strangers wrote (`cell.py`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

ENDING_S = 1.0
QUIET = {"GGML_NO_BACKTRACE": "1", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # no threads that do nothing


def why_no_child() -> str:
    """Return why this program cannot start another Python, an empty text where it can."""
    if getattr(sys, "frozen", False):
        return "this program is packed in one file"
    name = Path(sys.executable or "").name.lower()
    if "python" not in name and "pypy" not in name:
        return f"{sys.executable or 'this program'} is not Python"
    return "" if os.access(sys.executable, os.X_OK) else f"{sys.executable} cannot be run"


def start_command(code: str) -> list[str]:
    """Return the command that runs Python `code` in a process that finds our modules where this one found them."""
    return [sys.executable, "-c", f"import sys; sys.path[:] = sys.argv[1:]; {code}", *sys.path]


def end_child(process: subprocess.Popen[bytes]) -> None:
    """End a child, and wait for a second at most: one that hangs at a drive ends when the drive answers."""
    if process.poll() is None:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING_S)


def how_ended(code: int) -> str:
    """Return a child's exit code in words."""
    if code >= 0:
        return f"code {code}"
    if code == -signal.SIGXCPU:
        return "it went on and on"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def last_words(output: bytes) -> str:
    """Return what was said about the end, short."""
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    told = [line for line in lines if "ASSERT" in line or "what():" in line or "Error" in line]
    text = (told or lines[:1] or [""])[0].rpartition("/")[2]
    return f": {text[:160]}" if text else ""


def limit(**most: int) -> None:
    """Limit this process, as far as the system can: `DATA=1 << 30` for memory, `CPU=30` for seconds, `CORE=0`."""
    with contextlib.suppress(ImportError):
        import resource

        for name, value in most.items():
            with contextlib.suppress(AttributeError, OSError, ValueError):
                kind = getattr(resource, f"RLIMIT_{name}")
                hard = resource.getrlimit(kind)[1]
                resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def skip_package_code(name: str) -> None:
    """Let the modules of package `name` be imported without what the package itself imports: it takes longer."""
    if name not in sys.modules and (spec := importlib.util.find_spec(name)) and spec.submodule_search_locations:
        package = types.ModuleType(name)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package

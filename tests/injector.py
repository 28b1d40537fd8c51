"""Builds and works `injector.c`: in a process that was started under it, one call of a kind can be made to fail."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def compiler() -> str | None:
    """Return the C compiler of this machine, if it has one."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def build(folder: Path, source: Path = SOURCE) -> Path:
    """Compile the injector, or another such `source`, into `folder`; return the library."""
    library, found = folder / f"{source.stem}.so", compiler()
    assert found, "no C compiler"
    subprocess.run([found, "-O1", "-Wall", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


def environment(library: Path) -> dict[str, str]:
    """Return what a process is started with to be under the injector `library`."""
    return {**os.environ, "LD_PRELOAD": str(library), "OMP_WAIT_POLICY": "passive", "GGML_NO_BACKTRACE": "1"}


class Injector:
    """The injector that this process was started under."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.injector_failed.restype = ctypes.c_char_p
        self._library.injector_disarm.restype = ctypes.c_long
        self._library.injector_arm.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_long, ctypes.c_int]

    def arm(self, kind: str, caller: str, nth: int, error: int) -> None:
        """Let the `nth` call from now on, of `kind` and by `caller` (see `injector.c`), fail with errno `error`."""
        self._library.injector_arm(kind.encode(), caller.encode(), nth, error)

    def disarm(self) -> tuple[int, str]:
        """Let nothing fail any more; return how many calls there were, and the function that failed, if one did."""
        calls: int = self._library.injector_disarm()
        return calls, self._library.injector_failed().decode()

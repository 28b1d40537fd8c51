"""Takes from a process what a system that is not Linux lacks: of its C library, of `os`, and of Python's modules.

Faked is what is missing, not the name of the system: Python's own library would act on that, and not find its parts.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

# What psutil, numpy and the like need themselves is loaded as on this system.
import llama_cpp  # noqa: F401
import numpy as np  # noqa: F401
import psutil  # noqa: F401

MISSING = {
    "macos": (
        *("O_DIRECT", "memfd_create", "posix_fadvise", "POSIX_FADV_DONTNEED", "POSIX_FADV_RANDOM"),
        *("sched_getaffinity", "sched_setaffinity", "posix_fallocate", "eventfd"),
    ),
    "windows": (
        *("O_DIRECT", "O_CLOEXEC", "O_NOFOLLOW", "memfd_create", "posix_fadvise", "POSIX_FADV_DONTNEED"),
        *(
            "POSIX_FADV_RANDOM",
            "sched_getaffinity",
            "sched_setaffinity",
            "posix_fallocate",
            "eventfd",
            "pread",
            "preadv",
        ),
        *("pwrite", "fork", "register_at_fork", "getuid", "geteuid", "statvfs", "fchmod", "O_DIRECTORY", "getpgid"),
    ),
}
MODULES = {"macos": (), "windows": ("fcntl", "termios", "resource", "pwd", "grp", "tty", "pty")}


def pretend(system: str) -> None:
    """Take away from this process what `system` lacks."""
    real = ctypes.CDLL

    class Library(real):  # type: ignore[misc,valid-type]
        def __init__(self, name: Any = None, *arguments: Any, **options: Any) -> None:
            if name is None and system == "windows":
                raise TypeError("argument of type 'NoneType' is not iterable")
            super().__init__("libc.so.6" if name == "msvcrt" else name, *arguments, **options)

        def __getattr__(self, name: str) -> Any:
            if self._name is None and name in ("mremap", "fallocate", "fallocate64", "malloc_trim"):
                raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
            return super().__getattr__(name)

    ctypes.CDLL = Library  # type: ignore[misc]
    for name in MISSING[system]:
        if hasattr(os, name):
            delattr(os, name)
    for name in MODULES[system]:
        sys.modules[name] = None  # type: ignore[assignment]

"""Files of secrets: who may read them, and the keys in one."""

from __future__ import annotations

import contextlib
import stat
import sys
from collections.abc import Callable
from pathlib import Path

MOST_KEY_FILE_BYTES = 1 << 20


def key_lines(text: str) -> list[str]:
    """Return the keys in the text of a key file: one a line, without blanks around it; a line with # first is none."""
    return [key for line in text.splitlines() if (key := line.strip()) and not key.startswith("#")]


def tell_if_open(file: Path, say: Callable[[str], object]) -> None:
    """Say where everybody on this machine may read a file with a secret; its group may, as systemd has it."""
    with contextlib.suppress(OSError):
        if sys.platform != "win32" and stat.S_IMODE(file.stat().st_mode) & 0o007:
            say(f"{file}: everybody on this machine may read it; chmod o= {file}")

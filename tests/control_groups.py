"""A control group that limits what a test starts in it; the kernel counts, and is not fooled."""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
CANNOT = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT}


@contextmanager
def control_group(version_2: Mapping[str, str], controller: str, version_1: Mapping[str, str]) -> Iterator[Path]:
    """Yield the folder of a new group with these limits, by file; skips where none can be made.

    version_1: of the hierarchy of `controller`, where there is no version 2.
    """
    is_version_2 = (ROOT / "cgroup.controllers").exists()
    group = None
    try:
        group = Path(tempfile.mkdtemp(prefix="edge-run-test-", dir=ROOT if is_version_2 else ROOT / controller))
        for name, limit in (version_2 if is_version_2 else version_1).items():
            if "swap" not in name or (group / name).exists():  # a kernel without swap has none to limit
                (group / name).write_text(limit)
    except OSError as error:
        if group is not None:
            group.rmdir()
        if error.errno not in CANNOT:
            raise
        pytest.skip(f"cannot limit anything with a control group ({error})")
    try:
        yield group
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)

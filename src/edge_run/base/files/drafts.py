"""Drafts: what is written under a name of its own first, and what killed processes left of that.

A draft lies beside the file or the folder that it is to become, and its name says which process makes it.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from edge_run.base.process_ids import is_running, process_scope

_ABANDONED_S = 60.0  # a draft that somebody writes is written to more often
_ABANDONED_ELSEWHERE_S = 3600.0  # one of another machine or container, or of before a restart: whichever it is
_DRAFT = re.compile(r"\..*\.([1-9]\d*)-(?:([0-9a-f]{8})-)?[0-9a-f]{8}\.part", re.ASCII | re.DOTALL)
_drafts: set[Path] = set()  # that this process writes


@contextlib.contextmanager
def draft_of(path: Path) -> Iterator[Path]:
    """Yield the name of a draft of `path`; what has it at the end of the block, or when a signal ends us, goes."""
    draft = path.with_name(f".{path.name}.{os.getpid()}-{process_scope()}-{os.urandom(4).hex()}.part")
    _drafts.add(draft)
    try:  # also of the creation: a Ctrl-C may come right after it
        yield draft
    finally:
        _remove(draft)
        _drafts.discard(draft)


def _remove(draft: Path) -> None:
    """Remove a file, or a folder and what it holds, if it is there."""
    with contextlib.suppress(OSError):
        if draft.is_dir():
            import shutil  # which most commands do without

            shutil.rmtree(draft)
        else:
            draft.unlink(missing_ok=True)


def remove_drafts() -> None:
    """Remove the drafts of this process, which a signal is about to end."""
    for draft in list(_drafts):
        if _writer(draft) == os.getpid():  # else of the process that this one was forked from
            _remove(draft)


def remove_abandoned_drafts(path: Path) -> None:
    """Remove drafts of `path` whose process was killed, or ended with the power."""
    with contextlib.suppress(OSError):
        for found in abandoned_drafts(path.parent):
            if found.name.startswith(f".{path.name}."):
                _remove(found)


def abandoned_drafts(folder: Path) -> list[Path]:
    """Return the drafts in `folder` whose process was killed, or ended with the power. Raises OSError."""
    return [found for found in sorted(folder.glob(".*.part")) if found not in _drafts and _is_abandoned(found)]


def _is_abandoned(draft: Path) -> bool:
    if not (found := _DRAFT.fullmatch(draft.name)):
        return False
    try:
        parts = [draft, *(draft.iterdir() if draft.is_dir() else ())]
        silent_s: float = time.time() - max(part.stat().st_mtime for part in parts)
    except OSError:  # whoever writes it was done just now
        return False
    if found[2] != process_scope():
        return silent_s > _ABANDONED_ELSEWHERE_S
    writer = int(found[1])
    is_gone = writer == os.getpid() or not is_running(writer)  # this process knows its own
    return silent_s > _ABANDONED_S and is_gone


def _writer(draft: Path) -> int | None:
    """Return the number of the process that made a draft; None for a file of another name."""
    found = _DRAFT.fullmatch(draft.name)
    return int(found[1]) if found else None

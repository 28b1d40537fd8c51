"""Reads and writes that pass the page cache by (O_DIRECT), where a file system has them."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable

from edge_run.tiers import _libc

_NO_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY)  # how file systems say that they have none


def open_direct(open_with: Callable[[int], int], transfer: Callable[[int, list[memoryview]], int]) -> int | None:
    """Return the descriptor that `open_with` makes, given a flag; None where its file system has no direct transfers.

    transfer: reads or writes a page at the beginning; some file systems refuse only this.

    Raises OSError.
    """
    if not (direct := getattr(os, "O_DIRECT", 0)):
        return None
    try:
        with contextlib.ExitStack() as undo:
            descriptor = open_with(direct)
            undo.callback(os.close, descriptor)
            page = _libc.map_anonymous(_libc.PAGE)
            try:
                transfer(descriptor, [_libc.view(page, _libc.PAGE)])
            finally:
                _libc.unmap(page, _libc.PAGE)
            undo.pop_all()
            return descriptor
    except OSError as error:
        if error.errno in _NO_DIRECT:
            return None
        raise

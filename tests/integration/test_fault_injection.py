"""Calls that fail, one at a time, in every kind of run: each is said in one line or does not matter, and all goes on.

A sample: the first calls of each kind, and some of the rest. `benchmarks/fault_injection.py` goes through all of them.
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from faults import is_right, sweep
from injector import build, compiler

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler builds the injector")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("injector"))


@pytest.mark.parametrize(
    ("scenario", "kind", "caller", "error", "step", "most"),
    [
        ("dense", "read", "ours", errno.EIO, 131, 6),
        ("copied", "read", "ours", errno.EIO, 211, 3),
        ("moe", "read", "ours", errno.EIO, 23, 7),
        ("packed", "read", "ours", errno.EIO, 29, 7),
        ("draft", "read", "ours", errno.EIO, 173, 4),
        ("slices", "read", "ours", errno.EIO, 71, 4),
        ("upload", "read", "ours", errno.EIO, 2, 3),
        ("fetched", "write", "ours", errno.ENOSPC, 13, 5),
        ("packing", "write", "ours", errno.ENOSPC, 7, 4),
        ("packing", "read", "ours", errno.EIO, 9, 40),  # the last of them when the file is whole
        ("tracing", "write", "ours", errno.ENOSPC, 3, 4),
        ("first", "open", "ours", errno.EMFILE, 7, 5),
        ("moe", "map", "ctypes", errno.ENOMEM, 61, 7),
        ("dense", "thread", "ours", errno.EAGAIN, 1, 2),
    ],
)
def test_a_call_that_fails_is_said_and_the_rest_goes_on(
    library: Path, folder: Path, scenario: str, kind: str, caller: str, error: int, step: int, most: int
) -> None:
    found = list(sweep(library, scenario, folder, kind, caller, error, step, most))
    tried = [one for one in found if "outcome" in one]
    assert len(tried) >= min(most, 2), "calls were made, and failed"
    assert not [one for one in tried if not is_right(one)]

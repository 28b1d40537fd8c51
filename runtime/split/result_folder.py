"""The folder that `split train` writes: new or empty before, and afterwards there with all its files or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from edge_run.base.errors import TierReadError, reason_of
from edge_run.base.files.folders import cache_folder
from edge_run.base.files.whole import check_room, folder_to_write, reserved, whole_folder, writing
from edge_run.runtime.split.bundle import StoredCode, write_code


def check_result_folder(out: Path) -> Path:
    """Return the folder that is written. Raises ConfigError, or TierReadError where it cannot be made."""
    place = folder_to_write(out, f"--out {out}")
    if not os.access(next(one for one in place.parents if one.exists()), os.W_OK):
        raise TierReadError(f"--out {out}: cannot be written (Permission denied); choose another folder")
    return place


@contextlib.contextmanager
def room_for_result(out: Path, needed_bytes: int) -> Iterator[None]:
    """Keep room for the folder `out` in this block. Raises TierReadError before it, where there is none."""
    check_room(out, needed_bytes, "another folder with --out")
    with contextlib.ExitStack() as room:
        with writing(f"--out {out}", "choose another folder"):
            out.parent.mkdir(parents=True, exist_ok=True)
            room.enter_context(reserved(out, needed_bytes))
        yield


def write_result_folder(out: Path, files: dict[str, bytes], code: StoredCode, mode: int) -> None:
    """Write what was learned to `out`, or where that fails to the cache; TierReadError says where it is then.

    mode: who may read the networks, less the umask.
    """
    try:
        _write_folder(out, files, code, mode)
    except OSError as error:
        instead = _free_folder(cache_folder() / f"split-{code.head[:12]}")
        with writing(f"--out {out}: {reason_of(error)}; {instead}"):
            _write_folder(instead, files, code, mode)
        raise TierReadError(
            f"--out {out}: cannot be written ({reason_of(error)}); what was learned is in {instead}: move it"
        ) from error


def _free_folder(path: Path) -> Path:
    """Return `path`, or where something is there already, as from the same training before, `path` with a number."""
    names = itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2)))
    return next(one for one in map(path.with_name, names) if not os.path.lexists(one))


def _write_folder(out: Path, files: dict[str, bytes], code: StoredCode, mode: int) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(out) as draft:
        for name, data in files.items():
            with os.fdopen(os.open(draft / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(data)
        write_code(draft, code)

"""The folder that `split train` writes: new or empty before, and afterwards there with all its files or not at all.

Hours of training are not to be lost for want of room, so its files are there before, as large as they may become.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from edge_run.base.errors import ConfigError, TierReadError, reason_of
from edge_run.base.files.drafts import draft_of
from edge_run.base.files.folders import cache_folder
from edge_run.base.files.whole import (
    check_room,
    fill_file,
    folder_to_write,
    place_folder,
    reserve_file,
    whole_folder,
    writing,
)
from edge_run.runtime.split.bundle import HEAD_FILE, digest


def check_result_folder(out: Path) -> Path:
    """Return the folder that is written. Raises ConfigError, or TierReadError where it cannot be made."""
    place = folder_to_write(out, f"--out {out}")
    if not os.access(next(one for one in place.parents if one.exists()), os.W_OK):
        raise TierReadError(f"--out {out}: cannot be written (Permission denied); choose another folder")
    return place


@dataclass(frozen=True, slots=True)
class ResultRoom:
    """Room on the disk for the folder `out`.

    mode: who may read the files, less the umask.
    draft: of the folder, with all files, which have no content.
    give_back: removes it.
    """

    out: Path
    mode: int
    draft: Path
    give_back: Callable[[], None]

    def write(self, files: Mapping[str, bytes]) -> None:
        """Write what was learned to `out`, or where that fails elsewhere; TierReadError says where it is then."""
        try:
            for name, content in files.items():
                fill_file(self.draft / name, content)
            place_folder(self.draft, self.out)
        except OSError as error:
            self.give_back()  # the next place may be on the same disk
            _write_elsewhere(self, files, error)


@contextlib.contextmanager
def room_for_result(out: Path, sizes: Mapping[str, int], mode: int) -> Iterator[ResultRoom]:
    """Keep room for the folder `out` in this block, for files of these sizes. Raises TierReadError where there is none.

    mode: who may read them, less the umask.
    """
    check_room(out, sum(sizes.values()), "another folder with --out")
    with contextlib.ExitStack() as room:
        with writing(f"--out {out}", "choose another folder"):
            out.parent.mkdir(parents=True, exist_ok=True)
            draft = room.enter_context(draft_of(out))
            draft.mkdir()
            _make_files(draft, sizes, mode)
        yield ResultRoom(out, mode, draft, room.close)


def _make_files(draft: Path, sizes: Mapping[str, int], mode: int) -> None:
    for name, size_bytes in sizes.items():
        reserve_file(draft / name, size_bytes, mode)


def _write_elsewhere(room: ResultRoom, files: Mapping[str, bytes], why: OSError) -> NoReturn:
    """Write what was learned to the cache, or at the last to the folder for temporary files; raise TierReadError."""
    told = f"--out {room.out}: cannot be written ({reason_of(why)})"
    name = f"split-{digest(files[HEAD_FILE])[:12]}"
    places: list[tuple[Callable[[], Path], str]] = [
        (lambda: cache_folder() / name, "move it"),
        (lambda: Path(tempfile.gettempdir(), f"edge-run-{name}"), "move it soon, that folder is cleared at times"),
    ]
    for find, advice in places:
        try:
            place = _free_folder(find())
            place.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(place) as draft:
                _make_files(draft, {one: len(content) for one, content in files.items()}, room.mode)
                for one, content in files.items():
                    fill_file(draft / one, content)
        except ConfigError:  # there is no home folder
            continue
        except OSError as error:
            told += f"; elsewhere neither ({reason_of(error)})"
            continue
        raise TierReadError(f"{told}; what was learned is in {place}: {advice}", errno=why.errno) from why
    raise TierReadError(f"{told}; what was learned is lost: make room, and train again", errno=why.errno) from why


def _free_folder(path: Path) -> Path:
    """Return `path`, or where something is there already, as from the same training before, `path` with a number."""
    names = itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2)))
    return next(one for one in map(path.with_name, names) if not os.path.lexists(one))

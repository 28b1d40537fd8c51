"""Stores the pieces of models that this device fetched from others, within the disk space that it was allowed.

Each model has a folder named by its hash, which one process uses at a time. When space is needed, the pieces of other
models go first, those of the longest unused model before the rest; then pieces of the same model that are not needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection
from pathlib import Path

from edge_run.base.errors import EdgeRunError, MeshError, TierReadError, option, reason_of
from edge_run.base.units import MIB, format_size
from edge_run.devices.host.locks import NO_LOCKS, LivingFile, locked, read_living
from edge_run.tiers.partial import JOURNAL, PartialModel
from edge_run.tiers.pieces import Pieces, model_hash

DIGESTS_FILE = "digests"
LEFT_FREE_BYTES = 64 * MIB  # of the disk, for others
_USER = "user-"


class FetchedModel:
    """A fetched model, in use by this process until it is closed."""

    def __init__(self, folder: Path, model: str, sizes: Collection[int], digests: bytes, user: LivingFile) -> None:
        self.model, self.digests = model, digests
        self._user = user
        self.partial = PartialModel(folder, model, Pieces(tuple(sizes)))

    def close(self) -> None:
        """Let others use it. Idempotent."""
        self.partial.close()
        self._user.remove()


class FetchedModels:
    """The models that were fetched, in `folder`.

    most_bytes: what they may take of the disk together; 0 is nothing, and none.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder, self._most_bytes = folder, most_bytes

    def known_digests(self, model: str, sizes: Collection[int]) -> bytes | None:
        """Return the digests of a model's pieces, where they were fetched before."""
        with contextlib.suppress(OSError):
            digests = (self._folder / model / DIGESTS_FILE).read_bytes()
            if model_hash(tuple(sizes), digests) == model:
                return digests
        return None

    def open(self, model: str, sizes: Collection[int], digests: bytes) -> FetchedModel:
        """Return what is here of a model, perhaps nothing yet. Raises MeshError where another process uses it."""
        folder = self._folder / model
        with contextlib.ExitStack() as undo:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with locked(self._folder / "lock"):  # else who makes room could remove the folder before it is used
                    folder.mkdir(exist_ok=True, mode=0o700)
                    if any(read_living(folder, _USER)):
                        raise MeshError(f"{folder}: another process computes with it now")
                    user = LivingFile(folder, _USER, b"in use")
                undo.callback(user.remove)
                if self.known_digests(model, sizes) is None:
                    (folder / DIGESTS_FILE).write_bytes(digests)
                found = FetchedModel(folder, model, sizes, digests, user)
                undo.callback(found.partial.close)
                os.utime(folder / JOURNAL)
            except EdgeRunError:  # some of which are errors of the system, too
                raise
            except OSError as error:
                place = option("cache_folder")
                advice = f"; name one of a drive of this device with {place}" if error.errno in NO_LOCKS else ""
                raise MeshError(f"{folder}: cannot keep fetched weights there ({reason_of(error)}){advice}") from error
            undo.pop_all()
            return found

    def make_room(self, fetched: FetchedModel, needed: Collection[int]) -> None:
        """See that the pieces `needed` of a model may be fetched. Raises TierReadError where there is no room for them.

        Gives up what is used least, if need be: other models, then what of this one is not needed.
        """
        partial = fetched.partial
        partial.free_missing()
        more = partial.pieces.total_bytes(partial.missing(needed))
        with locked(self._folder / "lock"):
            others = sorted(self._folders(partial.folder), key=_last_used)
            may_suffice = more <= _free_bytes(partial.folder) + self._used_bytes()  # else they would go in vain
            while may_suffice and others and self._lacks_room(partial.folder, more):
                self._remove(others.pop(0))
        if self._lacks_room(partial.folder, more):
            partial.give_up(partial.beyond(needed))
        used = self._used_bytes()
        if used + more > self._most_bytes:
            raise TierReadError(
                f"--fetch {format_size(self._most_bytes)}: too small for {format_size(used + more)} of this model; "
                "allow more",
                found_bytes=self._most_bytes,
                needed_bytes=used + more,
                errno=errno.EDQUOT,
            )
        free = _free_bytes(partial.folder)
        if more > free:
            raise TierReadError(
                f"{partial.folder}: its disk has room for {format_size(free)}, {format_size(more)} are to be "
                "fetched; free some",
                found_bytes=free,
                needed_bytes=more,
                errno=errno.ENOSPC,
            )

    def _lacks_room(self, folder: Path, more_bytes: int) -> bool:
        """Return whether so many bytes are more than may be taken, or than the disk of `folder` has room for."""
        return self._used_bytes() + more_bytes > self._most_bytes or more_bytes > _free_bytes(folder)

    def _folders(self, but: Path) -> list[Path]:
        """Return the folders of models that nobody uses."""
        found = [path for path in self._folder.iterdir() if os.path.isdir(path) and path != but]
        return [path for path in found if not any(read_living(path, _USER))]

    def _used_bytes(self) -> int:
        return sum(
            _disk_bytes(Path(parent, name))
            for parent, folders, files in os.walk(self._folder)
            for name in (*folders, *files)
        )

    def _remove(self, folder: Path) -> None:
        (folder / JOURNAL).unlink(missing_ok=True)  # first: it says what is there
        shutil.rmtree(folder, ignore_errors=True)


def _free_bytes(folder: Path) -> int:
    """Return what may still be written to the disk of `folder`."""
    return max(0, shutil.disk_usage(folder).free - LEFT_FREE_BYTES)


def _disk_bytes(path: Path) -> int:
    with contextlib.suppress(OSError):
        status = path.lstat()
        return status.st_blocks * 512
    return 0


def _last_used(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return (folder / JOURNAL).stat().st_mtime
    return 0.0

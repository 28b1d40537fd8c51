"""Stubs: files that look like the model to llama.cpp and hold nothing but its header.

llama.cpp maps the files it opens, and populates the mapping: on the model itself that reads it all. A stub is the
model's header, then a hole up to its full size; after llama.cpp has read the header and before it maps, `cut` shortens
the file, so that there is nothing to populate. The mapping is then replaced by memory of ours (`Territory.claim`).
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from edge_run.base.errors import ModelFileError, TierReadError
from edge_run.tiers.gguf import Shard
from edge_run.tiers.territory import Span

_COPY_BYTES = 1 << 20


class Stubs:
    """The stubs of one model in a folder of their own, removed at the end. A context manager.

    heads: what they begin with, when that is not the header of their shard. Raises TierReadError when the folder cannot
    be written (full disk, no rights), ModelFileError when the model cannot be read.
    """

    def __init__(self, shards: Sequence[Shard], cache_folder: Path, heads: Sequence[bytes] = ()) -> None:
        self._shards = tuple(shards)
        self._heads = tuple(heads)
        self._head_bytes = [len(head) for head in heads] or [shard.data_offset for shard in shards]
        try:
            cache_folder.mkdir(parents=True, exist_ok=True)
            sweep_stubs(cache_folder)
            self._folder = Path(tempfile.mkdtemp(prefix=f"stub-{os.getpid()}-", dir=cache_folder))
        except OSError as error:
            raise TierReadError(
                f"{cache_folder}: cannot make a folder for the model's stub ({error.strerror}); free space there, "
                "or name another folder with --cache-dir"
            ) from error
        self.paths: list[Path] = []
        try:
            for number, shard in enumerate(self._shards):
                self.paths.append(self._write(shard, self._heads[number] if self._heads else None))
        except BaseException:
            self.close()
            raise

    def _write(self, shard: Shard, head: bytes | None) -> Path:
        path = self._folder / shard.path.name
        try:
            source = shard.path.open("rb") if head is None else io.BytesIO(head)
        except OSError as error:
            raise ModelFileError(f"{shard.path}: cannot be opened ({error.strerror})") from error
        head_bytes = shard.data_offset if head is None else len(head)
        with source:
            try:
                with path.open("wb") as stub:
                    left = head_bytes
                    while left > 0 and (data := source.read(min(left, _COPY_BYTES))):
                        stub.write(data)
                        left -= len(data)
                    stub.truncate(head_bytes + shard.size_bytes - shard.data_offset)
            except OSError as error:
                raise TierReadError(
                    f"{path}: writing a stub of {head_bytes} bytes failed ({error.strerror}); free space "
                    "there, or name another folder with --cache-dir",
                    needed_bytes=head_bytes,
                ) from error
        return path

    def cut(self) -> None:
        """Shorten every stub to its head."""
        for path, head_bytes in zip(self.paths, self._head_bytes, strict=True):
            os.truncate(path, head_bytes)

    def spans(self) -> list[Span]:
        """Return where this process has mapped the stubs, and where the files' bytes would be."""
        spans = []
        # The kernel writes names as they are, whatever their encoding, but for the end of a line.
        names = (os.fsencode(path.resolve()).replace(b"\n", rb"\012") for path in self.paths)
        numbers = {name: i for i, name in enumerate(names)}
        for line in Path("/proc/self/maps").read_bytes().split(b"\n"):
            addresses, _, offset, _, _, *name = line.split(None, 5) or [b""] * 5
            shard = numbers.get(name[0]) if name else None
            if shard is not None:
                start, stop = (int(text, 16) for text in addresses.split(b"-"))
                shift = self._head_bytes[shard] - self._shards[shard].data_offset
                spans.append(Span(shard, start, stop, start - int(offset, 16) + shift))
        return spans

    def close(self) -> None:
        """Remove the stubs. Idempotent."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Stubs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def sweep_stubs(cache_folder: Path) -> None:
    """Remove the stubs of processes that were killed while they loaded."""
    for folder in cache_folder.glob("stub-*-*"):
        pid = folder.name.split("-")[1]
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)

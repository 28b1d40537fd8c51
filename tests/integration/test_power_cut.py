"""The power fails while prompts are kept: what a next start finds is whole or gone, and what it says is right.

Every change of a file's name and every fdatasync is recorded while two texts are kept. A drive that lost its power has
the first few of these changes; of a file it has what was synchronised, and of the rest any beginning, zeros or nothing.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.config import ModelConfig
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.keeping.conversations import Conversation, Conversations
from edge_run.runtime.keeping.opening import open_keeper
from in_child import in_child
from tiny_models import N_VOCAB, make_narrow

TEXT = np.random.default_rng(0).integers(1, N_VOCAB, 700).tolist()
OPTIONS: dict[str, Any] = {"context_tokens": 1024, "micro_batch_tokens": 128, "threads": 1, "check_file": False}


class Journal:
    """The changes of files in a folder, in their order: (`sync`, path, content), (`name`, path, new path)."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.changes = folder, list[tuple[str, Path, Any]]()

    @contextmanager
    def recording(self) -> Iterator[None]:
        real = {name: getattr(os, name) for name in ("fdatasync", "fsync", "replace")}

        def syncing(name: str) -> Callable[[int], None]:
            def sync(descriptor: int) -> None:
                real[name](descriptor)
                path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
                if path.is_file():  # a folder's names count at once here
                    self.changes.append(("sync", path, path.read_bytes()))

            return sync

        def replace(source: Any, target: Any) -> None:
            self.changes.append(("name", Path(source), Path(target)))
            real["replace"](source, target)

        os.fdatasync, os.fsync, os.replace = syncing("fdatasync"), syncing("fsync"), replace
        try:
            yield
        finally:
            os.fdatasync, os.fsync, os.replace = real["fdatasync"], real["fsync"], real["replace"]

    def after(self, n_changes: int, rng: random.Random) -> dict[Path, bytes]:
        """Return the files of a drive that has the first `n_changes` changes; dirt is in what was not synchronised."""
        files: dict[Path, bytes] = {}
        whole = {path: content for kind, path, content in self.changes if kind == "sync"}
        for kind, path, what in self.changes[:n_changes]:
            if kind == "sync":
                files[path] = what
            else:
                files[what] = files.pop(path, b"" if rng.random() < 0.5 else bytes(64))
        if n_changes < len(self.changes) and self.changes[n_changes][0] == "sync":  # it was being written
            path = self.changes[n_changes][1]
            files[path] = whole[path][: rng.randrange(len(whole[path]))]
        return files


def lay(files: dict[Path, bytes], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@in_child
def test_the_next_start_is_right(name: str, tmp_path: Path) -> None:
    kept, rng = tmp_path / "kept", random.Random(0)
    engine = Engine.open(make_narrow(name, tmp_path), ModelConfig(**OPTIONS, prompt_cache=kept, backend="edge-run"))
    plain = Session(engine.decoder)
    wanted = plain.feed(TEXT)[0].copy()
    plain.forget()

    def read(tokens: list[int]) -> tuple[np.ndarray, int, list[str]]:
        """A process starts, and reads a text."""
        engine.decoder.clear()
        said: list[str] = []
        keeper = open_keeper(engine, said.append)
        assert keeper
        session = Session(engine.decoder)
        session.keeper = keeper
        logits, cached = session.feed(tokens)
        logits = logits.copy()
        keeper.close()
        session.forget()
        return logits, cached, said

    journal = Journal(kept)
    with journal.recording():
        assert np.array_equal(read(TEXT)[0], wanted)
        Conversations(kept).save(Conversation("one", "model", (("user", "a"),)))
        read([*TEXT[:300], *TEXT[:350]])
        Conversations(kept).save(Conversation("one", "model", (("user", "a"), ("assistant", "b"))))
    assert sum(kind == "name" for kind, _, _ in journal.changes) > 6
    most_cached = 0
    for n_changes in range(len(journal.changes) + 1):
        lay(journal.after(n_changes, rng), kept)
        for loaded in [Conversations(kept).load(one) for one, _ in Conversations(kept).names()]:
            assert [role for role, _ in loaded.parts] in (["user"], ["user", "assistant"])
        logits, cached, said = read(TEXT)
        assert np.array_equal(logits, wanted)
        assert cached >= most_cached
        most_cached = cached
        assert not said
        if n_changes % 4 == 0:
            again, cached, _ = read(TEXT)
            assert np.array_equal(again, wanted)
            assert cached >= 512
    assert most_cached >= 512
    engine.close()

"""Catalogues of models that are made up, of which one is open at most."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio

from edge_run.base.errors import ModelFileError
from edge_run.base.interrupt import Interrupt
from edge_run.runtime.server.catalogue.catalogue import Catalogue
from edge_run.runtime.server.catalogue.folder import ModelEntry, ModelFolder

FOUND = ModelFolder(tuple(ModelEntry(name, Path(f"{name}.gguf")) for name in ("a", "b", "broken")))


class Files:
    """Opens files; notes what is open, which is one at most."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.open: set[str] = set()

    def __call__(self, path: Path, interrupt: Interrupt | None = None) -> Any:
        assert not self.open
        if path.stem == "broken":
            raise ModelFileError("broken.gguf: it is broken")
        self.opened.append(path.stem)
        self.open.add(path.stem)
        return SimpleNamespace(
            path=path,
            close=lambda: self.open.remove(path.stem),
            cancel=lambda: None,
            forecast=lambda: None,
            _workplace=SimpleNamespace(wait_here=lambda: None),
        )


@asynccontextmanager
async def catalogue_of(files: Files, found: ModelFolder = FOUND) -> AsyncIterator[Catalogue]:
    with anyio.fail_after(30):
        async with Catalogue(found, files, lambda: found) as catalogue:
            yield catalogue
    assert not files.open

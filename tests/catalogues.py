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
from edge_run.runtime.server.catalogue.catalogue import Catalogue, OpenModel, as_opened
from edge_run.runtime.server.catalogue.folder import ModelEntry, ModelFolder, model_name

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
            metadata=lambda key: None,
            plan=SimpleNamespace(model_bytes=7),
            embedding=None,
            chat_template="",
            trained_context_tokens=0,
            _workplace=SimpleNamespace(wait_here=lambda: None),
        )


def open_catalogue(model: Any) -> Catalogue:
    """Return the catalogue of one model, which is open, and which tasks may share as it is."""
    entry = as_opened(ModelEntry(model_name(model.path), model.path), model)
    made = Catalogue(ModelFolder((entry,)), lambda path, interrupt: model)
    made.open = OpenModel(entry, model, model, model.forecast())
    made._turns.opened(entry.name)
    return made


@asynccontextmanager
async def catalogue_of(files: Files, found: ModelFolder = FOUND) -> AsyncIterator[Catalogue]:
    with anyio.fail_after(30):
        async with Catalogue(found, files, lambda: found) as catalogue:
            yield catalogue
    assert not files.open

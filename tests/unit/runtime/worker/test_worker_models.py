"""The models of a worker: why one that it should have is not taken."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ModelFileError, NotTrusted
from edge_run.runtime.fetch.exchange import PieceExchange
from edge_run.runtime.worker.models import ModelAsked, WorkerModels
from fake_mesh import Hub

ASKED = ModelAsked("0" * 64, "m.gguf", (4096,), (64,))


@pytest.fixture
def models(tmp_path: Path) -> WorkerModels:
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    config = ModelConfig(cache_folder=tmp_path / "cache")
    return WorkerModels([tmp_path], config, PieceExchange(Hub().join("b")))


def test_a_file_that_is_there_and_cannot_be_read_is_said_to_be_that(models: WorkerModels, tmp_path: Path) -> None:
    with pytest.raises(NotTrusted, match="copy the same file there"):
        models.find("a", ASKED, lambda: None)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelFileError, match=r"m\.gguf.*truncated"):
        models.find("a", ASKED, lambda: None)


@pytest.mark.parametrize("before", [replace(ASKED, name="another.gguf"), replace(ASKED, sizes=(8192,))])
def test_what_was_sought_under_another_name_or_with_other_sizes_says_nothing(
    models: WorkerModels, tmp_path: Path, before: ModelAsked
) -> None:
    """It may have been sought by somebody who meant another model, or to keep this one from being found."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    models.look_for(before, 20.0)
    earlier = models._search
    assert models.look_for(ASKED, 20.0) is None
    assert models._search is not earlier
    assert models._search is not None
    assert "truncated" in str(models._search.unread)
    again = models._search
    models.look_for(ASKED, 20.0)
    assert models._search is again, "asked for several times a second"


def test_a_file_that_is_named_is_taken_whatever_its_name_ends_in(tmp_path: Path) -> None:
    """Those in a folder end in .gguf."""
    path = tmp_path / "model.bin"
    path.write_bytes(b"GGUF")
    config = ModelConfig(cache_folder=tmp_path / "cache")
    asked = ModelAsked("0" * 64, "model.bin", (4096,), (64,))
    for folders, error in (([path], ModelFileError), ([tmp_path], NotTrusted)):
        with pytest.raises(error):
            WorkerModels(folders, config, PieceExchange(Hub().join("b"))).find("a", asked, lambda: None)

"""What the integration tests share: the bundled model, and a grown copy that does not fit its budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run import inflate
from edge_run.base.units import MIB
from kit_models import KIT
from tiny_models import make_model


@pytest.fixture(scope="session")
def kit() -> Path:
    """The bundled model, 7 MB: it fits every budget."""
    return KIT


@pytest.fixture(scope="session")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model grown to 120 MB, 12 layers: with the options of `streamed` it streams."""
    return inflate(KIT, tmp_path_factory.mktemp("grown") / "grown.gguf", 120 * MIB, layers=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models of this module are made."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def llama(folder: Path) -> Path:
    """A tiny model of random weights."""
    return make_model("llama", folder)

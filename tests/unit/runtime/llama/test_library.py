"""Which llama.cpp is installed is read from the name of a folder: as Python's own metadata says it."""

from __future__ import annotations

from collections.abc import Generator
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from edge_run.runtime.llama import library


@pytest.fixture(autouse=True)
def _asked_anew() -> Generator[None, None, None]:
    library.library_version.cache_clear()
    yield
    library.library_version.cache_clear()


def test_as_the_metadata_says() -> None:
    assert find_spec("llama_cpp") is not None
    assert library.library_version() == f"llama-cpp-python {version('llama-cpp-python')}"


@pytest.mark.parametrize(
    ("beside", "wanted"),
    [(["1.2.3+cu124"], "1.2.3+cu124"), ([], None), (["1.2.3", "1.2.4"], None)],
    ids=["one", "none", "what an upgrade left"],
)
def test_the_folder_beside_the_package(
    beside: list[str], wanted: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in beside:
        (tmp_path / f"llama_cpp_python-{one}.dist-info").mkdir()
    spec = ModuleSpec("llama_cpp", None)
    spec.submodule_search_locations = [str(tmp_path / "llama_cpp")]
    monkeypatch.setattr(library.PathFinder, "find_spec", lambda name: spec)
    assert library.library_version() == f"llama-cpp-python {wanted or version('llama-cpp-python')}"

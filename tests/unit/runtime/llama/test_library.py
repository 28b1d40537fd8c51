"""Which llama.cpp is installed is read from the name of a folder: as Python's own metadata says it."""

from __future__ import annotations

from collections.abc import Generator
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from edge_run.runtime.llama import library
from edge_run.runtime.probing.workload import this_setup


@pytest.fixture(autouse=True)
def _asked_anew() -> Generator[None, None, None]:
    asked = (library.library_version, library.library_build)
    for one in asked:
        one.cache_clear()
    yield
    for one in asked:
        one.cache_clear()


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
    install(tmp_path, monkeypatch)
    assert library.library_version() == f"llama-cpp-python {wanted or version('llama-cpp-python')}"


@pytest.mark.parametrize(("changed", "is_other"), [("libggml-cpu.so", True), ("libllama.so", True), ("README", False)])
def test_another_build_of_a_version_is_another(
    changed: str, is_other: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with GGML_NATIVE: what was measured with the one says nothing of the other."""
    (tmp_path / "llama_cpp_python-1.2.3.dist-info").mkdir()
    folder = tmp_path / "llama_cpp" / "lib"
    folder.mkdir(parents=True)
    for name in ("libggml-cpu.so", "libllama.so", "README"):
        (folder / name).write_text(name)
    install(tmp_path, monkeypatch)
    before, setup = library.library_build(), this_setup()
    assert before.startswith("llama-cpp-python 1.2.3, build of 25 bytes at ")
    (folder / changed).write_text("built again")
    library.library_build.cache_clear()
    assert (library.library_build() != before) == is_other
    assert (this_setup().file_name != setup.file_name) == is_other


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModuleSpec("llama_cpp", None)
    spec.submodule_search_locations = [str(folder / "llama_cpp")]
    monkeypatch.setattr(library.PathFinder, "find_spec", lambda name: spec)

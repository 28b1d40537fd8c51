"""The rules of the house that no linter expresses."""

import ast
import os
from importlib.metadata import version
from pathlib import Path

import pytest

import edge_run

ROOT = Path(__file__).parents[2]
FOLDERS = ("runtime", "tiers", "prefetch", "partition", "devices")
PRODUCT = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("src/edge_run", *FOLDERS)
    for parent, _, names in os.walk(ROOT / folder)  # does not follow the symlinks of src/edge_run
    for path in (Path(parent, name) for name in names)
    if path.suffix == ".py"
)
CTYPES_FILES = {"runtime/_ggml.py", "tiers/_libc.py"}
BINDING_TABLES = {"runtime/_ggml.py"}  # may be long
LINES = 400


def imported_packages(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("path", PRODUCT)
def test_product_file(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(source)
    assert ast.get_docstring(tree), "no module docstring"
    assert path in CTYPES_FILES or "ctypes" not in imported_packages(tree), f"only {CTYPES_FILES} import ctypes"
    assert path in BINDING_TABLES or source.count("\n") <= LINES, f"more than {LINES} lines"


def test_folders_are_flat() -> None:
    """A nested package would be missing from the wheel: pyproject.toml lists packages one by one."""
    packages = {"src/edge_run", "src/edge_run/base", "src/edge_run/cli", *FOLDERS}
    assert {str(Path(path).parent) for path in PRODUCT} == packages


@pytest.mark.parametrize("folder", FOLDERS)
def test_package_links_to_its_root_folder(folder: str) -> None:
    link = ROOT / "src/edge_run" / folder
    # A clone without symlinks has the target as text; it installs and imports all the same.
    assert (os.readlink(link) if link.is_symlink() else link.read_text()) == f"../../{folder}"


def test_installed_version_is_the_package_version() -> None:
    assert version("edge-run") == edge_run.__version__

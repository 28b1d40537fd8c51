"""docs/architecture.md and docs/glossary.md name files, functions and classes that exist, and every package."""

from __future__ import annotations

import ast
import builtins
import functools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("architecture.md", "glossary.md")
FOLDERS = ("src/edge_run", "runtime", "tiers", "prefetch", "partition", "devices")
_PATH = re.compile(r"`([\w./-]+\.(?:py|md|toml))`")
_NAMED = re.compile(r"`([\w./-]+\.py)`((?:[\s,]+`[A-Za-z_][\w.]*`)+)")  # a file, and the names that follow it directly
_CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)*)`")
_PACKAGE = re.compile(r"^\| `((?:runtime|devices)/\w+)/` \|", re.MULTILINE)


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


def file_of(path: str) -> Path:
    """Return the file that a page calls `path`: from the root of the repository, or from `src/edge_run`."""
    return next((file for folder in ("", "src/edge_run") if (file := ROOT / folder / path).is_file()), ROOT / path)


def targets_of(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AnnAssign) else []


def names_in(body: Iterable[ast.stmt]) -> set[str]:
    """Return the names that `body` defines; those of a class with its members, as `Class.member`."""
    names: set[str] = set()
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.ClassDef):
            names |= {statement.name, *(f"{statement.name}.{member}" for member in names_in(statement.body))}
        names |= {target.id for target in targets_of(statement) if isinstance(target, ast.Name)}
    return names


@functools.cache
def names_of(file: Path) -> set[str]:
    return names_in(ast.parse(file.read_text(encoding="utf-8")).body)


def test_names_of_a_file_are_found() -> None:
    source = "A: int = 1\nB = 2\ndef f(): ...\nclass C:\n    x: int\n    def m(self): ...\n"
    assert names_in(ast.parse(source).body) == {"A", "B", "f", "C", "C.x", "C.m"}


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page: str) -> None:
    paths = set(_PATH.findall(text_of(page)))
    assert paths
    assert not {path for path in paths if not file_of(path).is_file()}


@pytest.mark.parametrize("page", PAGES)
def test_names_after_a_file_are_defined_in_it(page: str) -> None:
    found = [(path, name) for path, names in _NAMED.findall(text_of(page)) for name in re.findall(r"[\w.]+", names)]
    assert found
    assert not [f"{path} {name}" for path, name in found if name not in names_of(file_of(path))]


@pytest.mark.parametrize("page", PAGES)
def test_classes_exist(page: str) -> None:
    """A class that stands without its file is one of ours too, or Python's."""
    product = {name for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") for name in names_of(file)}
    assert not {name for name in _CLASS.findall(text_of(page)) if name not in product and not hasattr(builtins, name)}


def test_every_package_is_in_the_table() -> None:
    found = {
        file.parent.relative_to(ROOT).as_posix()
        for top in ("runtime", "devices")
        for file in (ROOT / top).glob("*/__init__.py")
    }
    assert set(_PACKAGE.findall(text_of("architecture.md"))) == found

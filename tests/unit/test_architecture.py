"""docs/architecture.md and docs/glossary.md name files, functions and classes that exist.

And docs/architecture.md has every package, in the order of imports that pyproject.toml has import-linter check.
"""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = ("architecture.md", "glossary.md")
FOLDERS = ("src/edge_run", "runtime", "tiers", "prefetch", "partition", "devices")
_PATH = re.compile(r"`([\w./-]+\.(?:py|md|toml))`")
_NAMED = re.compile(r"`([\w./-]+\.py)`((?:[\s,]+`[A-Za-z_][\w.]*`)+)")  # a file, and the names that follow it directly
_CLASS = re.compile(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)*)`")
_PACKAGE = re.compile(r"^\| `(\w+(?:/\w+)+)/` \|", re.MULTILINE)
ORDERED = ("runtime", "devices", "cli")  # folders whose packages have an order of imports
FLAT = ("base", "tiers", "partition", "prefetch")  # folders whose files are listed, as they are in no package below


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


@functools.cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@functools.cache
def rows() -> list[str]:
    """Return the packages that docs/architecture.md has a row for, in its order."""
    return _PACKAGE.findall(text_of("architecture.md"))


def layers_of(folder: str) -> list[str]:
    """Return the order of imports in `folder`, the highest first."""
    contracts = project()["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == [f"edge_run.{folder}"])
    return list(layers)


def test_every_package_is_in_a_table() -> None:
    """Those in other packages too; the folders themselves have a table of their own."""
    listed = project()["tool"]["setuptools"]["packages"]
    names = [name.removeprefix("edge_run.").replace(".", "/") for name in listed]
    assert sorted(rows()) == sorted(name for name in names if "/" in name)


@pytest.mark.parametrize("folder", ORDERED)
def test_the_order_of_imports_is_printed(folder: str) -> None:
    part = text_of("architecture.md").partition(f"### The packages of `{folder}/`\n")[2].partition("\n#")[0]
    printed = re.findall(r"^```text\n(.*?)^```", part, re.MULTILINE | re.DOTALL)
    assert [block.splitlines() for block in printed] == [layers_of(folder)]


@pytest.mark.parametrize("folder", ORDERED)
def test_packages_stand_in_the_order_of_imports(folder: str) -> None:
    """Each after those that may import it, and what is in a package right after that package."""
    order = [name for layer in layers_of(folder) for name in layer.split(" | ")]
    found = [name for name in rows() if name.startswith(f"{folder}/")]
    outer = [name.split("/")[1] for name in found]
    assert [name.split("/")[1] for name in found if name.count("/") == 1] == [name for name in order if name in outer]
    assert [name for name, _ in itertools.groupby(outer)] == [name for name in order if name in outer]


@pytest.mark.parametrize("folder", FLAT)
def test_every_file_of_a_folder_without_packages_is_named(folder: str) -> None:
    place = ROOT / folder if (ROOT / folder).is_dir() else ROOT / "src/edge_run" / folder
    files = {f"{folder}/{file.name}" for file in place.glob("*.py") if file.name != "__init__.py"}
    assert files
    assert files - set(_PATH.findall(text_of("architecture.md"))) == set()

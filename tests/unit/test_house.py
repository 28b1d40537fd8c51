"""The rules of the house that no linter expresses."""

import ast
import functools
import graphlib
import itertools
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import edge_run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDERS = ("runtime", "tiers", "prefetch", "partition", "devices")
PRODUCT = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("src/edge_run", *FOLDERS)
    for parent, _, names in os.walk(ROOT / folder)  # does not follow the symlinks of src/edge_run
    for path in (Path(parent, name) for name in names)
    if path.suffix == ".py"
)
CTYPES_FILES = {"runtime/llama/_ggml.py", "tiers/_libc.py"}
BINDING_TABLES = {"runtime/llama/_ggml.py"}  # may be long
LINES, MODULES = 400, 20
CLASS_LINES, PARAMETERS = 200, 8


def package_of(path: str) -> str:
    """Return the package that the file at `path` is in."""
    return ".".join(("edge_run", *Path(path.removeprefix("src/edge_run/")).parts[:-1]))


PACKAGES = {package: [*paths] for package, paths in itertools.groupby(sorted(PRODUCT, key=package_of), package_of)}


@functools.cache
def source_of(path: str) -> str:
    """Return what is in the file at `path`; many tests read each file."""
    return (ROOT / path).read_text(encoding="utf-8")


@functools.cache
def tree_of(path: str) -> ast.Module:
    """Return the syntax tree of the file at `path`, which nobody changes."""
    return ast.parse(source_of(path))


@functools.cache
def statements_of(path: str) -> list[ast.AST]:
    """Return all statements of the file at `path`, also those within others.

    `ast.walk` goes through expressions too, of which there are many more, and which hold no statements.
    """
    found = list[ast.AST](tree_of(path).body)
    for one in found:  # grows meanwhile
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            found += getattr(one, part, ())
    return found


def imported_packages(path: str) -> set[str]:
    names: set[str] = set()
    for node in statements_of(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


# A test for each package: there are hundreds of files, and a test takes longer than to look at one.


@pytest.mark.parametrize("package", PACKAGES)
def test_product_files(package: str) -> None:
    wrong = list[str]()
    for path in PACKAGES[package]:
        if not ast.get_docstring(tree_of(path)):
            wrong.append(f"{path}: no module docstring")
        if path not in CTYPES_FILES and "ctypes" in imported_packages(path):
            wrong.append(f"{path}: only {CTYPES_FILES} import ctypes")
        if path not in BINDING_TABLES and source_of(path).count("\n") > LINES:
            wrong.append(f"{path}: more than {LINES} lines")
    assert not wrong


def test_every_package_is_listed() -> None:
    """One that pyproject.toml does not list would be missing from the wheel, and nothing would say so."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    found = {package_of(path): str(Path(path).parent) for path in PRODUCT}
    assert sorted(listed["packages"]) == sorted(found)
    assert listed["package-dir"] == found


def module_of(path: str) -> str:
    """Return the name that the file at `path` is imported by; of `__init__.py`, its package's."""
    stem = Path(path).stem
    return package_of(path) + ("" if stem == "__init__" else f".{stem}")


def test_no_circles() -> None:
    """No file imports itself by way of others; what only type checkers import counts, and what functions import."""
    modules = {module_of(path): path for path in PRODUCT}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for module, path in modules.items():
        for node in statements_of(path):
            if isinstance(node, ast.Import):
                graph[module].update(alias.name for alias in node.names if alias.name in modules)
            elif isinstance(node, ast.ImportFrom) and node.module in modules:
                names = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[module].update({name if name in modules else node.module for name in names})
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_small(package: str) -> None:
    names = [Path(path).stem for path in PACKAGES[package]]
    assert "__init__" in names
    assert len(names) - 1 <= MODULES, f"more than {MODULES} modules"
    if package in ("edge_run.runtime", "edge_run.devices"):
        assert names == ["__init__"], "modules lie in the packages below"
    if package not in ("edge_run", "edge_run.cli"):
        (path,) = (path for path in PRODUCT if module_of(path) == package)
        assert len(tree_of(path).body) == 1, "more than a docstring"


@functools.cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """Return all classes, each with its file."""
    return [(path, node) for path in PRODUCT for node in statements_of(path) if isinstance(node, ast.ClassDef)]


def test_public_classes_have_names_of_their_own() -> None:
    """One that another file has too would be found twice, and is another thing in each."""
    places: dict[str, list[str]] = {}
    for path, node in classes():
        if not node.name.startswith("_"):
            places.setdefault(node.name, []).append(path)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not shared, shared


def parameters_of(node: ast.ClassDef) -> int:
    """Return how many parameters the constructor written in a class has, `self` aside."""
    made = [item.args for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    return sum(len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs) - 1 for args in made)


def is_large(node: ast.ClassDef) -> bool:
    """Return whether a class has many lines, or its constructor takes many parameters."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    return lines > CLASS_LINES or parameters_of(node) > PARAMETERS


def test_a_large_class_says_why() -> None:
    """It has a sentence with "because" in its docstring."""
    silent = [
        f"{path}: {node.name}"
        for path, node in classes()
        if is_large(node) and " because " not in " ".join((ast.get_docstring(node) or "").split())
    ]
    assert not silent


@pytest.mark.parametrize("folder", FOLDERS)
def test_package_links_to_its_root_folder(folder: str) -> None:
    link = ROOT / "src/edge_run" / folder
    # A clone without symlinks has the target as text; it installs and imports all the same.
    assert (os.readlink(link) if link.is_symlink() else link.read_text()) == f"../../{folder}"


def test_installed_version_is_the_package_version() -> None:
    assert version("edge-run") == edge_run.__version__


def test_numpy_random_is_imported_with_the_module() -> None:
    """Imported later, as `np.random` does, it may lose a Ctrl-C that comes meanwhile."""
    assert not [path for path in PRODUCT if "np.random" in source_of(path)]


def test_why_the_system_refused_is_said_in_one_way() -> None:
    """An OSError that a library raises may be without the system's words."""
    told = re.compile(r"(?<!\bos)\.strerror\b")
    assert {path for path in PRODUCT if told.search(source_of(path))} == set()


def test_threads_are_counted_in_one_place() -> None:
    """Elsewhere the limits of control groups are forgotten, and the kernel stops all threads again and again."""
    counting = ("len(usable_cpus())", "os.cpu_count()")
    known = {"devices/host/machine.py", "devices/host/memory.py"}  # the latter: of the machine, for its kernel's books
    assert {path for path in PRODUCT if any(one in source_of(path) for one in counting)} <= known


def conditions_taken(path: str) -> list[str]:
    """Return where the file at `path` takes a condition, and not its lock."""
    conditions = {
        ast.unparse(target).split(".")[-1]
        for node in statements_of(path)
        if isinstance(node, ast.Assign) and "Condition(" in ast.unparse(node.value)
        for group in node.targets
        for target in (group.elts if isinstance(group, ast.Tuple) else [group])
    } | {"changed", "_changed"}  # of another module
    taken = (one.context_expr for node in statements_of(path) if isinstance(node, ast.With) for one in node.items)
    return [f"{path}:{one.lineno}" for one in taken if ast.unparse(one).split(".")[-1] in conditions]


@pytest.mark.parametrize("package", PACKAGES)
def test_locks_are_taken_by_themselves(package: str) -> None:
    """Ctrl-C within `Condition.__enter__`, which is Python, would leave its lock taken for good."""
    wrong = [place for path in PACKAGES[package] for place in conditions_taken(path)]
    assert not wrong, "take the lock that the condition is on"

"""What ships: the source distribution and the wheel that is built of it, and what a user's type checker sees."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(400)  # a distribution, a wheel and a type check, all from nothing

ROOT = Path(__file__).resolve().parents[2]
NEITHER = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "results")
PROGRAM = """
from edge_run import Model, plan

with Model("model.gguf", memory="1GiB") as model:
    reveal_type(model.generate("Once").result().text)
    reveal_type(plan("model.gguf"))
    tokens: str = model.generate("Once").result().token_ids
    model.generat("Once")
"""


def build(kind: str, source: Path, out: Path) -> Path:
    """Return the `kind` ("sdist" or "wheel") that setuptools builds of `source`."""
    out.mkdir()
    code = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=NEITHER)
    with tarfile.open(build("sdist", tree, folder / "built")) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return unpacked


@pytest.fixture(scope="module")
def wheel(source: Path) -> Path:
    """The wheel that is built of the source distribution."""
    return build("wheel", source, source.parent / "wheel")


def test_the_source_distribution_holds_all_that_it_takes_to_build_check_and_read(source: Path) -> None:
    for name in ("LICENSE", "NOTICE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml"):
        assert (source / name).read_bytes() == (ROOT / name).read_bytes()
    for folder, pattern in (("docs", "*.md"), ("tests", "**/*.py"), ("typings", "**/*.pyi"), ("benchmarks", "*.py")):
        wanted = {path.relative_to(ROOT) for path in (ROOT / folder).glob(pattern)}
        assert wanted
        assert {path.relative_to(source) for path in (source / folder).glob(pattern)} == wanted


def test_the_wheel_holds_the_packages_their_data_and_the_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE", "edge_run/py.typed"} <= names
    assert {"edge_run/models/kit-dense-q4_0.gguf", "edge_run/models/README.md"} <= names
    page = ROOT / "runtime" / "server" / "page"
    assert {f"edge_run/runtime/server/page/{path.name}" for path in page.iterdir()} <= names
    code = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "edge_run").rglob("*.py")}
    for folder in ("runtime", "tiers", "prefetch", "partition", "devices"):
        code |= {Path("edge_run", path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == {path.as_posix() for path in code}


def test_what_a_registry_shows(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    description = str(metadata.get_payload())
    assert "Model(" in description
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert all(link.startswith("https://") for link in links), "what lies in the repository is not there"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    first, beyond = sorted(int(minor) for minor in re.findall(r"3\.(\d+)", metadata["Requires-Python"]))
    shown = re.findall(r"^Programming Language :: Python :: 3\.(\d+)$", "\n".join(metadata.get_all("Classifier")), re.M)
    assert [int(minor) for minor in shown] == list(range(first, beyond))


def test_a_users_type_checker_sees_our_types(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(packages)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "MYPYPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(tmp_path / "venv/bin/python"),
         "--cache-dir", str(tmp_path / "cache"), "program.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    said = [line.partition(" ")[0] + " " + line.partition(" ")[2] for line in done.stdout.splitlines()]
    assert len(said) == 5, done.stdout + done.stderr
    assert 'program.py:5: note: Revealed type is "str"' in said[0].replace("builtins.", "")
    assert 'program.py:6: note: Revealed type is "edge_run.base.results.Plan"' in said[1]
    assert "program.py:7: error: Incompatible types in assignment" in said[2]
    assert 'program.py:8: error: "Model" has no attribute "generat"' in said[3]

"""What the doctor makes of Python and llama.cpp: versions, what the library says, a processor, GPUs."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_run.devices.host.findings import NOTE, OK, PROBLEM
from edge_run.runtime.doctor import library_check as library
from findings import state

NEEDED = ">=0.3.36,<0.3.37"
NATIVE = "CPU : AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | AVX512 = 1 | LLAMAFILE = 1 | "
FLAGS = "fpu avx avx2 f16c fma bmi2"


@pytest.mark.parametrize(
    ("version", "bounds", "is_in"),
    [
        ("3.10.0", ">=3.10,<3.14", True),
        ("3.9.18", ">=3.10,<3.14", False),
        ("3.14.0rc1", "<3.14,>=3.10", False),
        ("3.13.2+local", ">=3.10,<3.14", True),
        ("0.3.36", NEEDED, True),
        ("0.3.37", NEEDED, False),
        ("0.3.4", NEEDED, False),
        ("1", "", True),
    ],
)
def test_versions(version: str, bounds: str, is_in: bool) -> None:
    assert library.is_in_range(version, bounds) is is_in


def test_what_is_installed_here_is_what_is_needed() -> None:
    """The bounds are those of pyproject.toml, as the installed package has them."""
    assert state(library.check_python()) == OK
    assert state(library.check_python("3.9.1")) == PROBLEM
    assert "<" in library.needed_versions()
    assert state(library.check_version(library.installed_version(), library.needed_versions())) == OK
    assert state(library.check_version("0.3.99", NEEDED)) == NOTE
    missing = library.check_version(None, NEEDED)
    assert (missing.state, missing.advice) == (PROBLEM, f'{sys.executable} -m pip install "llama-cpp-python{NEEDED}"')


WHOLE = {"is_imported": True, "mismatch": "", "system_info": NATIVE, "has_gpu_support": False, "ending": ""}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"import_error": "ModuleNotFoundError: No module named 'llama_cpp'", "ending": ""}, "No module named"),
        ({"ending": "SIGILL"}, "SIGILL.*built for another processor"),
        ({"ending": ""}, "without a word"),
        ({**WHOLE, "mismatch": "its public structs differ in op"}, "structs differ in op.*no budget is kept"),
    ],
)
def test_a_library_that_does_not_work(facts: dict[str, object], words: str) -> None:
    found = library.check_loading(facts, NEEDED)
    assert state(found) == PROBLEM
    assert re.search(words, found.finding)
    assert "pip install" in found.advice


def test_a_library_that_is_late_is_not_taken_for_broken() -> None:
    found = library.check_loading({"is_imported": True, "ending": "no answer in 20 s", "is_late": True}, NEEDED)
    assert (state(found), found.finding) == (NOTE, "no answer in 20 s")
    assert "pip install" not in found.advice


def test_a_library_that_works() -> None:
    assert state(library.check_loading(WHOLE, NEEDED)) == OK


@pytest.mark.parametrize(
    ("flags", "wanted", "missing"),
    [
        (FLAGS, OK, ""),
        (FLAGS + " avx512f", OK, ""),
        (FLAGS + " avx512f avx512_vnni", NOTE, "without AVX512_VNNI,"),
        ("asimd asimddp", PROBLEM, "without DOTPROD, NEON,"),
    ],
)
def test_instructions_that_llama_cpp_was_built_without(
    write: Callable[..., Path], flags: str, wanted: str, missing: str
) -> None:
    line = "Features" if "asimd" in flags else "flags\t"
    root = write("proc/cpuinfo", f"processor\t: 0\n{line}\t: {flags}\nprocessor\t: 1\n")
    found = library.check_instructions(NATIVE, NEEDED, root)
    assert found
    assert state(found) == wanted
    assert missing in found.finding
    if wanted != OK:
        assert "CMAKE_ARGS=-DGGML_NATIVE=on" in found.advice


def test_without_avx2_it_is_a_problem(write: Callable[..., Path]) -> None:
    """As in many ready-made wheels; a feature that is listed with 0 is not there."""
    root = write("proc/cpuinfo", f"flags : {FLAGS}\n")
    found = library.check_instructions(NATIVE.replace("AVX2 = 1", "AVX2 = 0"), NEEDED, root)
    assert state(found) == PROBLEM


def test_where_the_processor_or_the_library_say_nothing(tmp_path: Path, write: Callable[..., Path]) -> None:
    assert library.check_instructions(NATIVE, NEEDED, tmp_path) is None
    assert library.check_instructions("", NEEDED, write("proc/cpuinfo", f"flags : {FLAGS}\n")) is None


@pytest.mark.parametrize(
    ("node", "flag"),
    [
        ("dev/nvidia0", "-DGGML_CUDA=on"),
        ("etc/nv_tegra_release", "-DGGML_CUDA=on"),
        ("dev/dri/renderD128", "-DGGML_VULKAN=on"),
    ],
)
def test_a_gpu_that_llama_cpp_was_not_built_for(write: Callable[..., Path], node: str, flag: str) -> None:
    root = write(node)
    (found,) = library.check_gpu(False, (), NEEDED, root)
    assert (found.state, f"CMAKE_ARGS={flag} " in found.advice) == (NOTE, True)
    (found,) = library.check_gpu(True, [("GeForce", "CUDA0")], NEEDED, root)
    assert (found.state, "CUDA0 (GeForce)" in found.finding) == (OK, True)
    (found,) = library.check_gpu(True, (), NEEDED, root)
    assert (found.state, "finds none" in found.finding) == (NOTE, True)
    assert library.check_gpu(None, (), NEEDED, root) == [], "llama.cpp did not say"


def test_no_gpu(tmp_path: Path) -> None:
    (found,) = library.check_gpu(False, (), NEEDED, tmp_path)
    assert state(found) == OK


def test_a_gpu_that_this_user_may_not_use(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    root = write("dev/dri/renderD128")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert [found.state for found in library.check_gpu(True, (), NEEDED, root)] == [NOTE, NOTE]


def test_kernels_for_repacked_weights_are_named() -> None:
    found = library.check_kernels({"Q4_0": 8, "Q4_K": 8})
    assert found is not None
    assert found.state == OK
    assert "Q4_0 (8 rows at once), Q4_K (8 rows at once)" in found.finding
    none = library.check_kernels({})
    assert none is not None
    assert "none" in none.finding
    assert library.check_kernels(None) is None


def test_the_library_is_asked_without_code_from_the_folder_at_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('foreign')\n")
    monkeypatch.chdir(tmp_path)
    facts = library.ask_library(Path(os.fsdecode(b"no\xe9'.gguf")))
    assert (facts["ending"], facts["is_imported"]) == ("", True)
    assert facts["model_error"]

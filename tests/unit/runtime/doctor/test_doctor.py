"""What the doctor makes of facts: trees of procfs and sysfs, what llama.cpp says, files."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edge_run.base.results import to_json
from edge_run.base.units import GIB, KIB, MIB
from edge_run.devices.host import checkup
from edge_run.devices.host.findings import NOTE, OK, PROBLEM, Finding, Report
from edge_run.devices.host.ledger import Ledger, Run
from edge_run.devices.host.mount import Mount
from edge_run.runtime.doctor import doctor, file_check
from edge_run.runtime.doctor import library_check as library
from edge_run.runtime.doctor.file_check import left_over_drafts

NEEDED = ">=0.3.36,<0.3.37"
NATIVE = "CPU : AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | AVX512 = 1 | LLAMAFILE = 1 | "
FLAGS = "fpu avx avx2 f16c fma bmi2"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a file under a root folder of its own, and returns the root."""

    def write(path: str, text: str = "") -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return tmp_path

    return write


def state(found: Finding | None) -> str:
    assert found is not None
    assert (found.state == OK) <= (found.advice == "")
    assert "\n" not in found.finding + found.advice
    return found.state


def test_a_report_counts_and_is_json() -> None:
    report = Report((Finding("a", OK, "fine"), Finding("b", NOTE, "slow", "do"), Finding("c", PROBLEM, "no", "do")))
    assert (report.problems, report.notes) == (1, 1)
    assert json.loads(to_json(report))["findings"][1] == {
        "topic": "b", "state": "note", "finding": "slow", "advice": "do",
    }  # fmt: skip


# Python and llama.cpp


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
    assert __import__("re").search(words, found.finding)
    assert "pip install" in found.advice


def test_a_library_that_is_late_is_not_taken_for_broken() -> None:
    found = library.check_loading({"is_imported": True, "ending": "no answer in 20 s", "is_late": True}, NEEDED)
    assert (state(found), found.finding) == (NOTE, "no answer in 20 s")
    assert "pip install" not in found.advice


def test_what_a_killed_program_left_beside_a_model_is_named_with_a_command_that_removes_just_that(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "my models"
    folder.mkdir()
    left = folder / ".model.gguf.packed.2147483646-0123abcd-01234567.part"
    for path in (folder / "model.gguf", folder / ".model.part", left):
        path.touch()
        os.utime(path, (0, 0))
    (found,) = left_over_drafts(folder / "model.gguf")
    assert shlex.split(found.advice) == ["rm", "-r", str(left)]


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


# The device


def test_memory() -> None:
    assert state(checkup.check_memory(8 * GIB, 6 * GIB)) == OK
    assert state(checkup.check_memory(8 * GIB, 100 * MIB)) == PROBLEM


def test_limits_of_control_groups(write: Callable[..., Path]) -> None:
    root = write("proc/self/cgroup", "0::/slice/app\n")
    assert checkup.check_groups(root) == []
    write("sys/fs/cgroup/slice/app/memory.max", "max\n")
    write("sys/fs/cgroup/slice/memory.max", f"{2 * GIB}\n")
    (found,) = checkup.check_groups(root)
    assert state(found) == NOTE
    assert found.finding.startswith(f"2.00 GiB for the control group {root}/sys/fs/cgroup/slice;")


def test_runs_of_the_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    (found,) = checkup.check_runs(ledger)
    assert found.finding == "none"
    with Ledger(tmp_path, lambda promised_bytes: GIB).grant(GIB, "model.gguf", 0):
        (found,) = checkup.check_runs(ledger)
    assert state(found) == OK
    assert found.finding.startswith(f"process {os.getpid()} with model.gguf: granted 1.00 GiB, holds ")
    (found,) = checkup.check_runs(Ledger(tmp_path / "no" / "folder"))
    assert state(found) == NOTE


SWAPS = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"


def test_swap(write: Callable[..., Path], tmp_path: Path) -> None:
    assert checkup.check_swap(tmp_path) is None
    assert state(checkup.check_swap(write("proc/swaps", SWAPS))) == OK
    disk = checkup.check_swap(write("proc/swaps", SWAPS + "/swap.img  file  2097148  0  -2\n"))
    assert disk
    assert (state(disk), "2.00 GiB on /swap.img" in disk.finding) == (NOTE, True)
    zram = checkup.check_swap(write("proc/swaps", SWAPS + "/dev/zram0 partition 1048576 0 5\n" * 2))
    assert zram
    assert (state(zram), "2.00 GiB of zram" in zram.finding) == (NOTE, True)


def test_a_run_that_was_swapped_out(write: Callable[..., Path]) -> None:
    runs = [Run(pid, ("model.gguf",), GIB, GIB) for pid in (7, 8, 9)]
    write("proc/7/status", f"VmRSS:\t 9 kB\nVmSwap:\t {300 * KIB} kB\n")
    (found,) = checkup.check_swapped(runs, write("proc/8/status", "VmSwap:\t 0 kB\n"))
    assert state(found) == PROBLEM
    assert found.finding == "300 MiB of process 7 (model.gguf) is swapped out"


def test_overcommit(write: Callable[..., Path], tmp_path: Path) -> None:
    assert checkup.check_overcommit(GIB, tmp_path) is None
    assert state(checkup.check_overcommit(GIB, write("proc/sys/vm/overcommit_memory", "1\n"))) == OK
    write("proc/meminfo", f"MemTotal: 9 kB\nCommitLimit: {4 << 20} kB\nCommitted_AS: {3 << 20} kB\n")
    root = write("proc/sys/vm/overcommit_memory", "2\n")
    assert state(checkup.check_overcommit(GIB, root)) == NOTE
    assert state(checkup.check_overcommit(GIB + 1, root)) == PROBLEM


def test_mappings(write: Callable[..., Path], tmp_path: Path) -> None:
    assert checkup.check_map_count(tmp_path) is None
    root = write("proc/sys/vm/max_map_count", "65530\n")
    assert state(checkup.check_map_count(root)) == OK
    assert state(checkup.check_map_count(root, 70_000)) == NOTE
    assert state(checkup.check_map_count(write("proc/sys/vm/max_map_count", "30000\n"))) == NOTE


def test_huge_pages(write: Callable[..., Path], tmp_path: Path) -> None:
    path = "sys/kernel/mm/transparent_hugepage/enabled"
    assert checkup.check_huge_pages(tmp_path) is None
    assert state(checkup.check_huge_pages(write(path, "always [madvise] never\n"))) == OK
    assert state(checkup.check_huge_pages(write(path, "always madvise [never]\n"))) == NOTE


def test_the_lock_limit_is_never_a_problem() -> None:
    assert state(checkup.check_lock_limit()) == OK


@pytest.mark.parametrize(
    ("driver", "governor", "wanted"),
    [
        ("acpi-cpufreq", "schedutil", OK),
        ("cpufreq-dt", "powersave", NOTE),
        ("intel_pstate", "powersave", OK),
        ("tegra194", "performance", OK),
    ],
)
def test_governor(write: Callable[..., Path], driver: str, governor: str, wanted: str) -> None:
    """Of processors that set their own speed, `powersave` is the usual governor."""
    for cpu in (0, 1):
        write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_driver", f"{driver}\n")
        root = write(f"sys/devices/system/cpu/cpu{cpu}/cpufreq/scaling_governor", f"{governor}\n")
    assert state(checkup.check_governor(root)) == wanted


def test_no_governor(tmp_path: Path) -> None:
    assert checkup.check_governor(tmp_path) is None


# Files


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new" / "cache"
    (found,) = file_check.check_cache_folder(folder)
    assert state(found) == OK
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(file_check, "LEAST_FREE_BYTES", 1 << 60)
    (found,) = file_check.check_cache_folder(folder)
    assert (state(found), "--cache-dir" in found.advice) == (NOTE, True)
    monkeypatch.undo()
    monkeypatch.setattr(file_check, "find_mount", lambda path: Mount("tmpfs", "tmpfs", "", ""))
    (found,) = file_check.check_cache_folder(folder)
    assert (state(found), "in memory" in found.finding) == (NOTE, True)
    (tmp_path / "file").touch()
    (found,) = file_check.check_cache_folder(tmp_path / "file" / "cache")
    assert (state(found), "Not a directory" in found.finding) == (PROBLEM, True)


def test_what_a_demo_left_behind(tmp_path: Path) -> None:
    (tmp_path / "demo-abc").mkdir()
    (tmp_path / "demo-abc" / "demo.gguf").write_bytes(bytes(2 * MIB))
    _, demo = file_check.check_cache_folder(tmp_path)
    assert state(demo) == NOTE
    assert (demo.finding.startswith(f"{tmp_path}/demo-abc: 2 MiB"), demo.advice) == (True, f"rm -r {tmp_path}/demo-abc")


def test_a_file_with_holes(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.write(b"x" * MIB)
        file.seek(4 * MIB)
        file.write(b"x" * MIB)
        file.truncate(8 * MIB)
    (found,) = file_check.check_holes(path, 4096)
    assert state(found) == PROBLEM
    assert f"6 MiB of it were never written, the first at byte {MIB}" in found.finding
    path.write_bytes(b"x" * MIB)
    assert file_check.check_holes(path, 4096) == []


@pytest.mark.parametrize(
    ("file_system", "words"), [("nfs4", "over a network"), ("tmpfs", "takes memory"), ("ext4", "read directly")]
)
def test_what_the_model_is_read_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file_system: str, words: str
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(8192))
    monkeypatch.setattr(file_check, "find_mount", lambda path: Mount("/dev/sda1", file_system, "", ""))
    monkeypatch.setattr(file_check, "_reads_directly", lambda path: True)
    (found,) = file_check.check_drive(path, tmp_path)
    assert words in found.finding
    monkeypatch.setattr(file_check, "_reads_directly", lambda path: False)
    (found,) = file_check.check_drive(path, tmp_path)
    assert state(found) == NOTE


@pytest.mark.parametrize("place", ["devices/pci/sda", "devices/pci/sda/sda1"])
@pytest.mark.parametrize("said", ["0", "1"])
def test_rotating_drives_and_their_partitions(
    tmp_path: Path, write: Callable[..., Path], place: str, said: str
) -> None:
    write("sys/devices/pci/sda/queue/rotational", f"{said}\n")
    (tmp_path / "sys" / place).mkdir(exist_ok=True)
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    (tmp_path / "sys/dev/block/8:1").symlink_to(tmp_path / "sys" / place)
    assert file_check.is_rotational(os.makedev(8, 1), tmp_path) is (said == "1")
    assert not file_check.is_rotational(os.makedev(0, 44), tmp_path)


def test_size_against_the_budget() -> None:
    alone = "its weights alone take {} of the budget of 2.00 GiB: {}"
    small, large = file_check.check_size(GIB, 2 * GIB), file_check.check_size(2 * GIB, 2 * GIB)
    assert small.finding == alone.format("1.00 GiB", "`edge-run plan` says whether all of it fits")
    assert large.finding == alone.format("2.00 GiB", "it will be streamed")


# All of it


def test_whatever_a_check_fails_over_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such thing here")

    monkeypatch.setattr(library, "ask_library", lambda model: {"import_error": "ImportError: x", "ending": ""})
    for name in ("check_groups", "check_runs", "check_swap", "check_swapped", "check_overcommit", "check_map_count"):
        monkeypatch.setattr(checkup, name, fail)
    monkeypatch.setattr(doctor, "default_budget_bytes", fail)
    monkeypatch.setattr(library, "needed_versions", fail)
    monkeypatch.setattr(file_check, "find_mount", fail)
    report = doctor.examine(tmp_path / "none.gguf", tmp_path, ledger=Ledger(tmp_path))
    by_topic = {finding.topic: finding for finding in report.findings}
    assert by_topic["swap"].finding == "cannot be examined here (RuntimeError: no such thing here)"
    assert by_topic["model"].state == PROBLEM
    assert {"huge pages", "cache folder"} <= by_topic.keys()


def test_without_a_process_for_llama_cpp_the_others_are_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "no more of them")

    monkeypatch.setattr(library.subprocess, "run", refuse)
    report = doctor.examine(None, tmp_path, ledger=Ledger(tmp_path))
    by_topic = {finding.topic: finding for finding in report.findings}
    assert by_topic["llama.cpp"].state == PROBLEM
    assert "no process can be started for it" in by_topic["llama.cpp"].finding
    assert "swap" in by_topic


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

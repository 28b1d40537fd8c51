"""`edge-run doctor` as a user meets it, on a machine that is whole and on ones where half of it is broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from program import Result, run_anew, run_program
from screens import Screen


@pytest.fixture
def examine(environment: dict[str, str], tmp_path: Path) -> Callable[..., Result]:
    def examine(*arguments: object, before: list[str] | None = None, **settings: str) -> Result:
        told = {"environment": {**environment, **settings}, "folder": tmp_path}
        if before or settings:
            result = run_anew("doctor", *arguments, before=before or (), **told)
        else:
            result = run_program("doctor", *arguments, **told)
        assert "Traceback" not in result.stdout + result.stderr
        return result

    return examine


def states(result: Result) -> dict[str, str]:
    """The worst state of each topic in JSON, which is alone."""
    assert result.stderr == ""
    findings: list[dict[str, Any]] = json.loads(result.stdout)["findings"]
    assert all(finding.keys() == {"topic", "state", "finding", "advice"} for finding in findings)
    rank = ["ok", "note", "problem"]
    worst: dict[str, str] = {}
    for finding in findings:
        worst[finding["topic"]] = max(worst.get(finding["topic"], "ok"), finding["state"], key=rank.index)
    assert result.returncode == (1 if "problem" in worst.values() else 0)
    return worst


def finding(result: Result, topic: str) -> str:
    return next(f["finding"] for f in json.loads(result.stdout)["findings"] if f["topic"] == topic)


def test_a_line_for_each_finding_and_a_code(examine: Callable[..., Result], kit: Path) -> None:
    started = time.monotonic()
    result = examine(kit)
    duration = time.monotonic() - started
    *lines, last = result.stdout.splitlines()
    assert len(lines) >= 10
    assert all(re.match(r"(ok|note|problem) +[a-z]", line) for line in lines)
    assert re.fullmatch(r"\d+ problems?, \d+ notes?", last)
    assert result.returncode == (0 if last.startswith("0 ") else 1)
    assert "\x1b" not in result.stdout
    assert duration < 90, "2 s on a machine that does nothing else"


def test_json(examine: Callable[..., Result], kit: Path) -> None:
    found = states(examine(kit, "--json", "--memory", "200MiB"))
    for topic in ("python", "llama-cpp-python", "llama.cpp", "configuration", "model", "size", "cache folder"):
        assert found[topic] == "ok", topic


def test_the_model_that_does_not_fit_is_streamed(examine: Callable[..., Result], grown: Path) -> None:
    result = examine(grown, "--json", "--memory", "100MiB")
    assert "streamed" in finding(result, "size")
    assert states(result).get("holes", "ok") == "ok"


def test_files_that_are_no_models(examine: Callable[..., Result], kit: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("GGUF, said the file")
    part = tmp_path / "part.gguf"
    part.write_bytes(kit.read_bytes()[:5_000_000])
    unknown = tmp_path / "a\nmodel.gguf"
    data = kit.read_bytes()
    unknown.write_bytes(
        data.replace(
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
            b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0lamma",
        ).replace(b"llama.", b"lamma.")
    )
    for path in (tmp_path / "none.gguf", tmp_path / "text.gguf", part, unknown):
        result = examine(path, "--json")
        assert states(result)["model"] == "problem", path
    assert "unknown model architecture: 'lamma'" in finding(result, "model")
    assert "\n" not in finding(result, "model")


def test_a_download_that_is_not_finished(examine: Callable[..., Result], kit: Path, tmp_path: Path) -> None:
    """As programs that reserve the whole size first leave it."""
    path = tmp_path / "model.gguf"
    data = kit.read_bytes()
    path.write_bytes(data[:3_000_000])
    os.truncate(path, len(data))
    assert states(examine(path, "--json"))["holes"] == "problem"


BROKEN = {
    "missing": "raise ImportError('no llama_cpp here')",
    "unloadable": "raise RuntimeError('Failed to load shared library: libcudart.so.12: cannot open')",
    "foreign": "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
    "silent": "import os; os._exit(0)",
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_llama_cpp_that_is_broken(how: str, examine: Callable[..., Result], kit: Path, tmp_path: Path) -> None:
    package = tmp_path / "path" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "llama_cpp.py").write_text(BROKEN[how])
    result = examine(kit, "--json", PYTHONPATH=str(package.parent))
    assert states(result)["llama.cpp"] == "problem"
    words = {
        "missing": "no llama_cpp here",
        "unloadable": "libcudart",
        "foreign": "another processor",
        "silent": "ends",
    }
    assert words[how] in finding(result, "llama.cpp")


def test_a_configuration_that_is_broken(examine: Callable[..., Result], tmp_path: Path) -> None:
    """Other commands refuse to start over it."""
    file = tmp_path / "home" / ".config" / "edge-run" / "config.toml"
    file.parent.mkdir(parents=True)
    file.write_text("memory = \n")
    result = examine("--json")
    assert states(result)["configuration"] == "problem"
    assert str(file) in finding(result, "configuration")
    file.write_text("memroy = '4GiB'\n")
    assert "'memroy': unknown" in finding(examine("--json"), "configuration")
    file.write_text(f"cache-dir = {json.dumps(str(tmp_path / 'mine'))}\n")
    assert str(tmp_path / "mine") in finding(examine("--json"), "cache folder")


def test_no_home_and_no_rights(examine: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert states(examine("--json", "--cache-dir", tmp_path / "file"))["cache folder"] == "problem"
    assert states(examine("--json", HOME="/proc/nowhere"))["cache folder"] == "problem"


def test_usage_is_told_from_findings(examine: Callable[..., Result]) -> None:
    result = examine("--nonsense")
    assert (result.returncode, result.stdout) == (2, "")
    assert "Exit code: 0 when nothing is a problem" in examine("--help").stderr + examine("--help").stdout


@pytest.mark.root
def test_without_procfs_and_sysfs(examine: Callable[..., Result], kit: Path) -> None:
    hide = 'mount -t tmpfs none /proc && mount -t tmpfs none /sys && exec "$0" "$@"'
    before = ["unshare", "--mount", "sh", "-c", hide]
    if os.geteuid() != 0 or subprocess.run([*before, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    result = examine(kit, before=before)
    assert re.search(r"^note +memory +cannot be examined here", result.stdout, re.MULTILINE)
    assert re.search(r"^problem +page frames +.*cannot be opened.*mount /proc", result.stdout, re.MULTILINE)
    assert re.search(r"^1 problem, \d+ notes?$", result.stdout, re.MULTILINE)


def test_colours_at_a_terminal(screen: Callable[..., Screen], kit: Path) -> None:
    """And no line is broken in two, so that what is to be done can be copied."""
    shown = screen("doctor", kit, TERM="xterm", COLUMNS="40")
    shown.end()
    text = shown.text
    assert "\x1b[32mok" in text
    assert re.search(r"\x1b\[32mok[^\n]*configuration[^\n]*which is fine", text)

"""Whether Python and the installed llama.cpp are what edge-run needs, and built for this processor and its GPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_run.base.errors import reason_of
from edge_run.devices.host.findings import NOTE, OK, PROBLEM, Finding
from edge_run.devices.host.system_files import system_text
from edge_run.runtime.processes.child_process import how_ended, start_command

LONGEST_S = 20
LIBRARY = "llama-cpp-python"
_INSTRUCTIONS = {  # as the kernel names them, and llama.cpp
    "avx": "AVX", "avx2": "AVX2", "fma": "FMA", "f16c": "F16C", "bmi2": "BMI2", "avx_vnni": "AVX_VNNI",
    "avx512f": "AVX512", "avx512vbmi": "AVX512_VBMI", "avx512_vnni": "AVX512_VNNI", "avx512_bf16": "AVX512_BF16",
    "amx_int8": "AMX_INT8",
    "asimd": "NEON", "asimddp": "DOTPROD", "asimdhp": "FP16_VA", "i8mm": "MATMUL_INT8", "sve": "SVE",
}  # fmt: skip
_ESSENTIAL = {"AVX", "AVX2", "FMA", "F16C", "NEON", "DOTPROD"}


def ask_library(model: Path | None = None) -> dict[str, Any]:
    """Return what llama.cpp says about itself, and about `model`, from a process of its own: it may end it.

    Keys: those of `library_child.py` as far as it came, and `ending`, empty when it came to the end; `is_late` where it
    was not waited for any longer. `start_error`: where the system refused the process.
    """
    name = os.fspath(model) if model else ""
    command = start_command(f"from edge_run.runtime.doctor.library_child import main; main({name!r})")
    try:
        done = subprocess.run(command, capture_output=True, timeout=LONGEST_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired as error:
        return _facts(error.stdout or b"") | {"ending": f"no answer in {LONGEST_S} s", "is_late": True}
    except OSError as error:
        return {"start_error": reason_of(error), "ending": ""}
    return _facts(done.stdout) | {"ending": how_ended(done.returncode) if done.returncode else ""}


def _facts(output: bytes) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in output.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError, TypeError):  # what a library prints when it is loaded
            name, value = json.loads(line)
            facts[name] = value
    return facts


def check_python(found: str = sys.version.split(maxsplit=1)[0], needed: str = "") -> Finding:
    """Whether this Python is one that edge-run is tested with. needed: as in pyproject.toml; empty: the installed."""
    needed = needed or importlib.metadata.metadata("edge-run")["Requires-Python"]
    if is_in_range(found, needed):
        return Finding("python", OK, found)
    return Finding("python", PROBLEM, f"{found}, {needed} is needed", "make another virtual environment")


def check_version(found: str | None, needed: str) -> Finding:
    """Whether the installed llama-cpp-python is one that edge-run is tested with. needed: `>=0.3.36,<0.3.37`."""
    install = f'{sys.executable} -m pip install "{LIBRARY}{needed}"'
    if found is None:
        return Finding(LIBRARY, PROBLEM, "is not installed", install)
    if is_in_range(found, needed):
        return Finding(LIBRARY, OK, found)
    return Finding(LIBRARY, NOTE, f"{found} is installed, edge-run is tested with {needed}", install)


def check_loading(facts: Mapping[str, Any], needed: str) -> Finding:
    """Whether the library can be loaded, and is the one whose structs we know."""
    if facts.get("start_error"):
        text = f"cannot be examined: no process can be started for it ({facts['start_error']})"
        return Finding("llama.cpp", PROBLEM, text, "end other programs, or raise the limits (ulimit -n, ulimit -u)")
    if facts.get("import_error"):
        return Finding("llama.cpp", PROBLEM, f"cannot be loaded: {facts['import_error']}", rebuild("", needed))
    if "has_gpu_support" not in facts and facts.get("is_late"):
        advice = "try again: its first start with a GPU, or from a slow card, takes longer"
        return Finding("llama.cpp", NOTE, str(facts["ending"]), advice)
    if "has_gpu_support" not in facts:
        reason = f"ends the process that loads it ({facts.get('ending') or 'without a word'})"
        if facts.get("ending") == "SIGILL":
            reason += ": it was built for another processor"
        return Finding("llama.cpp", PROBLEM, reason, rebuild("-DGGML_NATIVE=on", needed))
    if facts.get("mismatch"):
        text = f"{facts['mismatch']}; until then llama.cpp's own loader runs models, and no budget is kept"
        return Finding("llama.cpp", PROBLEM, text, f'{sys.executable} -m pip install "{LIBRARY}{needed}"')
    return Finding("llama.cpp", OK, "loads, and is the one we know")


def check_instructions(system_info: str, needed: str, root: Path = Path("/")) -> Finding | None:
    """Whether llama.cpp was built with what this processor has. system_info: llama.cpp's own words."""
    flags = _processor_flags(root)
    there = {name for flag, name in _INSTRUCTIONS.items() if flag in flags}
    if not there or not system_info:
        return None
    built = {name for name, value in re.findall(r"(\w+) = (\d+)", system_info) if value != "0"}
    if not there - built:
        return Finding("instructions", OK, f"all of this processor's: {', '.join(sorted(there))}")
    state = PROBLEM if (there - built) & _ESSENTIAL else NOTE
    text = f"llama.cpp was built without {', '.join(sorted(there - built))}, which this processor has: it is slower"
    return Finding("instructions", state, text, rebuild("-DGGML_NATIVE=on", needed))


def check_kernels(repacked: Mapping[str, int] | None) -> Finding | None:
    """Which weights have kernels that compute several rows at once. repacked: how many, by type; None: not known."""
    if repacked is None:
        return None
    if not repacked:
        return Finding("kernels", OK, "llama.cpp has none for repacked weights on this processor")
    types = ", ".join(f"{name} ({rows} rows at once)" for name, rows in repacked.items())
    return Finding("kernels", OK, f"for repacked weights: {types}; edge-run probe measures which are faster")


def check_gpu(
    has_gpu_support: bool | None, offered: Sequence[tuple[str, str]], needed: str, root: Path = Path("/")
) -> list[Finding]:
    """Whether there is a GPU that llama.cpp was not built for, or that this user may not use.

    offered: what llama.cpp can compute on, and its name of it.
    """
    if offered:
        names = ", ".join(f"{name} ({what})" for what, name in offered)
        return [Finding("gpu", OK, f"{names}; llama.cpp is built for it, and uses what --gpu-memory gives")]
    nodes = sorted((root / "dev/dri").glob("renderD*"))
    is_tegra = (root / "etc/nv_tegra_release").exists() or (root / "dev/nvhost-gpu").exists()
    is_nvidia = (root / "dev/nvidia0").exists() or (root == Path("/") and shutil.which("nvidia-smi") is not None)
    kind = "Jetson" if is_tegra else "NVIDIA" if is_nvidia else nodes[0].name if nodes else ""
    if not kind:
        return [Finding("gpu", OK, "none found; models run on the processor")]
    findings = []
    if has_gpu_support:
        findings.append(Finding("gpu", NOTE, f"{kind}; llama.cpp is built for a GPU, and finds none that it can use"))
    elif has_gpu_support is not None:
        flags = "-DGGML_CUDA=on" if is_tegra or is_nvidia else "-DGGML_VULKAN=on"
        text = f"{kind}, and llama.cpp is built for the processor alone: the GPU is not used"
        findings.append(Finding("gpu", NOTE, text, rebuild(flags, needed)))
    if nodes and not any(os.access(node, os.R_OK | os.W_OK) for node in nodes) and not (is_tegra or is_nvidia):
        text = f"{nodes[0]} may not be used by this user"
        findings.append(Finding("gpu", NOTE, text, "sudo usermod -aG render,video $USER, then log in again"))
    return findings


def installed_version() -> str | None:
    """Return the version of the installed llama-cpp-python, None where there is none."""
    try:
        return importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        return None


def needed_versions() -> str:
    """Return the versions of llama-cpp-python that edge-run asks for, as `>=0.3.36,<0.3.37`."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("edge-run") or ():
            if requirement.startswith(LIBRARY):
                return requirement.removeprefix(LIBRARY).partition(";")[0].strip(" ()")
    return ""


def is_in_range(version: str, bounds: str) -> bool:
    """Return whether `version` is within `bounds`, as `>=3.10,<3.14`; other comparisons are left to pip."""
    found = _numbers(version)
    least = [_numbers(text) for text in re.findall(r">=\s*([\d.]+)", bounds)]
    below = [_numbers(text) for text in re.findall(r"<\s*([\d.]+)", bounds)]
    return all(found >= bound for bound in least) and all(found < bound for bound in below)


def rebuild(flags: str, needed: str) -> str:
    """Return the command that builds llama.cpp anew."""
    command = f"{sys.executable} -m pip install --force-reinstall --no-deps --no-cache-dir --no-binary {LIBRARY}"
    return f'{f"CMAKE_ARGS={flags} " if flags else ""}{command} "{LIBRARY}{needed}"'


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _processor_flags(root: Path) -> set[str]:
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", system_text(root / "proc/cpuinfo"), re.MULTILINE)
    return set(match[1].split()) if match else set()

"""Examines an installation, the device and a model file: what is wrong, and what to do about it.

Nothing is changed, but that the cache folder is made where it is missing. Whatever a check meets, the others go on.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from edge_run.base.config import CHUNK_BYTES
from edge_run.base.errors import EdgeRunError
from edge_run.devices.host import checkup
from edge_run.devices.host.findings import NOTE, PROBLEM, Finding, Report
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import default_budget_bytes
from edge_run.runtime.doctor import library_check as library
from edge_run.tiers.gguf import GgufModel, read_gguf

logger = logging.getLogger(__name__)

Check = tuple[str, Callable[[], Finding | Iterable[Finding] | None]]


def examine(
    model: Path | None,
    cache_folder: Path | None,
    memory_bytes: int | None = None,
    ledger: Ledger | None = None,
    also: Path | None = None,
) -> Report:
    """Return what there is to say. Raises nothing.

    model: a file to examine too. cache_folder: None where there is none. memory_bytes: the budget that a run would be
    given; None: what it would take. ledger: the user's, if it is not said. also: a copy of the model.
    """
    ledger = ledger or Ledger()
    budget_bytes = 0  # where it cannot be told
    with contextlib.suppress(Exception):
        budget_bytes = default_budget_bytes(ledger.promised_bytes)
    gguf, refusal = _headers(model)
    facts = library.ask_library(model if gguf else None)
    findings = [*_run(_installation(facts)), *_run(_device(ledger, budget_bytes, gguf))]
    if cache_folder is not None:
        findings += _run(_cache(cache_folder))
    findings += refusal
    if model is not None and gguf is not None:
        findings += _run(_model(model, gguf, memory_bytes or budget_bytes, facts))
        findings += _run(_copy(gguf, also)) if also else []
    return Report(tuple(findings))


def _headers(model: Path | None) -> tuple[GgufModel | None, list[Finding]]:
    if model is None:
        return None, []
    try:
        return read_gguf(model), []
    except EdgeRunError as error:
        return None, [Finding("model", PROBLEM, str(error))]
    except Exception as error:
        return None, [_unexamined("model", error)]


def _installation(facts: dict[str, Any]) -> Iterator[Check]:
    needed = library.needed_versions()
    yield "python", library.check_python
    yield library.LIBRARY, lambda: library.check_version(library.installed_version(), needed)
    yield "llama.cpp", lambda: library.check_loading(facts, needed)
    yield "instructions", lambda: library.check_instructions(str(facts.get("system_info", "")), needed)
    yield "kernels", lambda: library.check_kernels(facts.get("repacked"))
    yield "gpu", lambda: library.check_gpu(facts.get("has_gpu_support"), facts.get("gpus", ()), needed)


def _device(ledger: Ledger, budget_bytes: int, gguf: GgufModel | None) -> Iterator[Check]:
    chunks = gguf.data_bytes // CHUNK_BYTES if gguf else 0
    yield "page frames", _check_frames
    yield "memory", lambda: checkup.check_memory(psutil.virtual_memory().total, budget_bytes)
    yield "memory limit", checkup.check_groups
    yield "processor time", checkup.check_quota
    yield "host", checkup.check_host
    yield "other runs", lambda: checkup.check_runs(ledger)
    yield "swap", checkup.check_swap
    yield "swap", lambda: checkup.check_swapped(ledger.runs())
    yield "overcommit", lambda: checkup.check_overcommit(budget_bytes)
    yield "mappings", lambda: checkup.check_map_count(needed=chunks)
    yield "huge pages", checkup.check_huge_pages
    yield "locked memory", checkup.check_lock_limit
    yield "processor speed", checkup.check_governor


def _check_frames() -> Finding:
    from edge_run.runtime.doctor.file_check import check_frames  # what it imports is not there on every system

    return check_frames()


def _cache(folder: Path) -> Iterator[Check]:
    from edge_run.runtime.doctor import file_check

    yield "cache folder", lambda: file_check.check_cache_folder(folder)
    yield "page cache", lambda: file_check.check_page_cache(folder)


def _model(path: Path, gguf: GgufModel, budget_bytes: int, facts: dict[str, Any]) -> Iterator[Check]:
    from edge_run.runtime.doctor import file_check

    error = str(facts.get("model_error", ""))
    if "has_gpu_support" in facts and "model_error" not in facts:
        error = "" if facts.get("is_late") else f"it ends over it ({facts['ending']})"
        if not error:
            late = f"{path}: of llama.cpp, {facts['ending']} about it"
            yield "model", lambda: Finding("model", NOTE, late, "try again: from a slow card it takes longer")
    yield "model", lambda: file_check.check_model(path, gguf, error)
    if budget_bytes:
        yield "size", lambda: file_check.check_size(gguf.data_bytes, budget_bytes)
    for shard in gguf.shards:
        yield "holes", functools.partial(file_check.check_holes, shard.path, shard.data_offset)
    yield "drive", lambda: file_check.check_drive(path)
    yield "left over", lambda: list(file_check.left_over_drafts(path))


def _copy(gguf: GgufModel, also: Path) -> Iterator[Check]:
    from edge_run.runtime.doctor.file_check import check_second_drive

    yield "also", lambda: check_second_drive(gguf, also)


def _run(checks: Iterator[Check]) -> list[Finding]:
    """Return what the checks found; what one of them fails over is a finding too."""
    findings: list[Finding] = []
    while True:
        topic = "examination"
        try:
            topic, check = next(checks)
            found = check()
            findings += [found] if isinstance(found, Finding) else list(found or ())
        except StopIteration:
            return findings
        except Exception as error:
            findings.append(_unexamined(topic, error))


def _unexamined(topic: str, error: Exception) -> Finding:
    logger.info("examining %s failed", topic, exc_info=error)
    return Finding(topic, NOTE, f"cannot be examined here ({type(error).__name__}: {error})")

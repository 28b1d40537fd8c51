"""One measurement after the other, each in a process of its own that finds the model's files cold."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from edge_run.base.bench import Measurement
from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, KernelError
from edge_run.base.results import ExpertUse, Numerics, TuningDecision
from edge_run.base.units import KIB, format_size
from edge_run.devices.host.system_files import system_text
from edge_run.runtime.bench.memory_group import OwnMemoryGroup
from edge_run.runtime.processes.child_answer import read_answer, request_line
from edge_run.runtime.processes.child_process import start_command
from edge_run.tiers._libc import forget_pages

TICK_S = 0.5
ENDING_S = 10.0
LAST_WORDS = 300


class OutOfMemory(Exception):
    """The kernel ended a measurement of the model at `path`: its memory group, of `limit_bytes`, was full."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        super().__init__(f"the kernel ended it for want of memory inside {format_size(limit_bytes)}")
        self.path = path

    def of_ours(self) -> BudgetError:
        """Return the error that it is where edge-run ran, which keeps its budget."""
        return BudgetError(
            f"{self.path}: edge-run took more than its budget: {self}; please report this, and give more --memory "
            "until it is mended"
        )


class ColdRuns:
    """Runs measurements of the model in `files`, the first of which is opened, inside a memory group.

    `close` ends the one that runs and removes the group; it may be called by a signal handler, and more than once.
    """

    def __init__(self, files: Sequence[Path], limit_bytes: int) -> None:
        """limit_bytes: of the group; where none can be made, its `reason` says why."""
        self._files = files
        self._child: subprocess.Popen[bytes] | None = None
        self.group = OwnMemoryGroup(limit_bytes)

    def run(
        self, config: ModelConfig, prompt: Sequence[int], predict_tokens: int, on_tick: Callable[[float], None]
    ) -> Measurement:
        """Return what a process measured. on_tick: is told every half second how many have passed.

        Raises OutOfMemory, KernelError when it died of something else, and what opening the model raises.
        """
        drop_from_page_cache(self._files)
        folder = self.group.renew()
        request = request_line(
            path=self._files[0].absolute(),
            config={field.name: getattr(config, field.name) for field in fields(config)},
            prompt=list(prompt),
            predict=predict_tokens,
            group=folder or "",
            limit_bytes=self.group.limit_bytes if folder else 0,
        )
        try:
            code, answer, words = self._run_child(request, on_tick)
            kills = self.group.kills
        finally:
            self.close()
        if code == 0 and (text := read_answer(answer)) is not None:
            return parse_measurement(text)
        if kills:
            raise OutOfMemory(self._files[0], self.group.limit_bytes)
        raise KernelError(
            f"{self._files[0]}: the process that measured {config.backend} ended with {code}: "
            f"{' '.join(words.split())[-LAST_WORDS:] or 'without a word'}",
        )

    def close(self) -> None:
        """End what runs, and leave nothing. Idempotent."""
        if self._child is not None:
            self._child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a wait without a limit could lock up in a handler
                self._child.wait(ENDING_S)
        self.group.close()

    def _run_child(self, request: bytes, on_tick: Callable[[float], None]) -> tuple[int, bytes, str]:
        """Return how a child ended, its standard output and its standard error. It ends when its input does."""
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as notices:
            self._child = child = subprocess.Popen(
                start_command("from edge_run.runtime.bench.child import main; main()"),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=notices,
                start_new_session=True,  # Ctrl-C ends it through us
            )
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError), child.stdin as pipe:
                pipe.write(request)
                pipe.flush()
                _wait(child, on_tick)
            output.seek(0)
            notices.seek(0)
            return child.wait(), output.read(), notices.read().decode("utf-8", "replace")


def _wait(child: subprocess.Popen[bytes], on_tick: Callable[[float], None]) -> None:
    started = time.monotonic()
    while child.returncode is None:
        on_tick(time.monotonic() - started)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(TICK_S)


def drop_from_page_cache(paths: Sequence[Path]) -> None:
    """Let the next reading of the files come from storage, as far as no other process has them mapped."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # a file system that cannot
                os.fsync(descriptor)  # pages that are not written yet cannot be dropped
            forget_pages(descriptor)
        finally:
            os.close(descriptor)


def read_ahead_bytes(path: Path, root: Path = Path("/")) -> int:
    """Return how much the kernel reads ahead of a page fault in the file at `path`, 0 where it does not say."""
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    # Only whole disks are in the first place; a partition lies in the folder of its disk, which it reads ahead with.
    places = f"sys/class/bdi/{number}/read_ahead_kb", f"sys/dev/block/{number}/../queue/read_ahead_kb"
    texts = (system_text(root / place) for place in places)
    return next((int(text) * KIB for text in texts if text.isdecimal()), 0)


def parse_measurement(text: str) -> Measurement:
    """Return what a child wrote."""
    found = json.loads(text)
    found["numerics"] = Numerics(**found["numerics"])
    found["token_ids"] = tuple(found["token_ids"])
    if use := found["experts"]:
        use["decisions"] = tuple(TuningDecision(**decision) for decision in use["decisions"])
        found["experts"] = ExpertUse(**use)
    return Measurement(**found)

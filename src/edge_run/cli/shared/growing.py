"""A model grown, at a terminal: for `edge-run inflate` and `edge-run demo`."""

from __future__ import annotations

import time
from pathlib import Path

from edge_run.base.interrupt import Interrupt
from edge_run.base.units import format_size
from edge_run.cli.shared.answer import NOTICE
from edge_run.cli.shared.terminal import Terminal


def grow(
    source: Path,
    target: Path,
    size_bytes: int,
    terminal: Terminal,
    layers: int | None = None,
    seed: int = 0,
    *,
    is_overwritten: bool = False,
) -> None:
    """Write `source`, grown, to `target`; at a terminal, show progress.

    Raises what the library's `inflate` raises, and KeyboardInterrupt.
    """
    started, interrupt, show = time.monotonic(), Interrupt(), terminal.percents("written")

    def progress(done_bytes: int, size_bytes: int) -> None:
        interrupt.check()
        show(done_bytes, size_bytes)

    with interrupt.hearing_signals():  # numpy.random loses what is raised while it is imported
        from edge_run.runtime.tools.inflate import inflate

        inflate(source, target, size_bytes, layers, seed, progress, is_overwritten=is_overwritten)
    size = format_size(target.stat().st_size)
    terminal.say(f"Wrote {target}: {size} in {time.monotonic() - started:.1f} s", NOTICE)

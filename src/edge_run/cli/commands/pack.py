"""`edge-run pack`: weights of a model again, compressed or repacked, in a file beside the model."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edge_run.base.interrupt import Interrupt
from edge_run.base.units import format_size
from edge_run.cli.shared.answer import NOTICE
from edge_run.cli.shared.options import MODEL, some_settings
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal


@click.command(
    cls=SettingsCommand,
    params=[MODEL, *some_settings("cache_dir")],
    short_help="Write a model's weights again, beside it, to be read faster.",
)
@click.option(
    "-o", "--output", "target", type=PATH, metavar="FILE",
    help="Where to, instead of beside the model; name it with --packed then.  [default: MODEL.packed]",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace FILE where it exists.")
@click.pass_obj
def pack(terminal: Terminal, model_file: Path, target: Path | None, force: bool, cache_dir: Path | None) -> None:
    """Compress the experts of MODEL without loss into a file of their own, which streaming then reads.

    The model stays as it is, and is still needed. It is worth it on a drive that is slow against the processor, for
    models in 16-bit numbers (F16, BF16); a run finds out by measuring, and reads what is faster. It needs the extra
    `pack`.

    Of a MODEL without experts, the file holds weights repacked for the kernels of this processor, so that they need not
    be repacked each time that they stream (--repack).
    """
    started, interrupt, show = time.monotonic(), Interrupt(), terminal.percents("packed")

    def progress(done_bytes: int, all_bytes: int) -> None:
        interrupt.check()
        show(done_bytes, all_bytes)

    with interrupt.hearing_signals():  # raised while llama.cpp logs, it would be kept until all is written
        from edge_run.runtime.tools.pack import pack as pack_model

        made = pack_model(model_file, target, is_overwritten=force, cache_folder=cache_dir, progress=progress)
    left_out = "".join(
        f"; {name} was left out, which comes down to {made.left_out[name]:.0%}" for name in made.left_out
    )
    held = f"repacked: {', '.join(made.repacked)}" if made.repacked else f"{made.share:.1%} of what it holds"
    terminal.say(
        f"Wrote {made.path}: {format_size(made.size_bytes)}, {held}, {made.tensors} tensors, in "
        f"{time.monotonic() - started:.1f} s{left_out}",
        NOTICE,
    )

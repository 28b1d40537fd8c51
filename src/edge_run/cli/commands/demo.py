"""`edge-run demo`: the bundled model, grown past its memory budget and streamed, before your eyes."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from edge_run.base.errors import Cancelled, TierReadError
from edge_run.base.results import Plan
from edge_run.base.sampling_config import SamplingConfig
from edge_run.base.units import MIB, format_size
from edge_run.cli.shared import figures
from edge_run.cli.shared.answer import opened, say_figures, show
from edge_run.cli.shared.growing import grow
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.process import cleaned_up
from edge_run.cli.shared.setting import size_option
from edge_run.cli.shared.settings import model_config, report
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal

KIT = Path(__file__).parents[2] / "models" / "kit-dense-q4_0.gguf"
PROMPT = "It was a dark evening, and the old man at the door"
LAYER_BYTES, LEAST_LAYERS, MOST_LAYERS = 10 * MIB, 8, 64  # much wider layers would need large compute buffers
CONTEXT_TOKENS, MICRO_BATCH_TOKENS = 512, 64


@click.command(
    cls=SettingsCommand,
    params=some_settings("threads", "readers", "cache_dir", "verbose"),
    short_help="See the bundled model streamed; needs no other file.",
)
@click.option(
    "--size", callback=size_option, default="400MiB", metavar="SIZE", help="Of the grown model.  [default: 400MiB]"
)
@click.option("--memory", callback=size_option, default="224MiB", metavar="SIZE", help="The budget.  [default: 224MiB]")
@click.option("-n", "--predict", type=click.IntRange(1), default=24, metavar="N", help="Tokens.  [default: 24]")
@click.option("--keep", is_flag=True, help="Keep the grown model.")
@click.pass_context
def demo(context: click.Context, /, size: int, memory: int, predict: int, keep: bool, **given: Any) -> None:
    """See a model run in less memory than it takes: no network, no other file.

    The model that comes with edge-run is grown, on your disk, and streamed from there inside a budget that it does not
    fit. Nothing is left behind.
    """
    terminal: Terminal = context.obj
    config = model_config(
        context,
        given,
        memory=memory,
        context_tokens=CONTEXT_TOKENS,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        check_file=False,
    )
    report(context, terminal, config)
    assert config.cache_folder is not None
    folder = _new_folder(config.cache_folder)
    with cleaned_up(lambda: None if keep else shutil.rmtree(folder, ignore_errors=True)):
        model_file = folder / "demo.gguf"
        terminal.say(
            f"1. Growing the bundled model from {format_size(KIT.stat().st_size)} to {format_size(size)}: noise that "
            "costs bytes and work, and changes nothing that the model says."
        )
        grow(KIT, model_file, size, terminal, layers=max(LEAST_LAYERS, min(MOST_LAYERS, size // LAYER_BYTES)))
        terminal.say_lines(f"\n2. Opening it with {format_size(memory)} of memory for the whole process. The plan:")
        with opened(model_file, config, terminal, is_quiet=True) as model:
            columns = terminal.console.width if terminal.shows_notices else None
            terminal.say_lines(figures.describe_items(model.plan, columns))
            terminal.say_lines(f"\n3. {_what_runs(model.plan)}\n")
            stream = model.generate(PROMPT, max_tokens=predict, sampling=SamplingConfig(temperature=0))
            answer = show(stream, model, terminal, before=PROMPT)
            terminal.say("")
            say_figures(answer, terminal)
    if keep:
        terminal.say("")
        terminal.say(f"Kept: edge-run {model_file} --memory {memory} -c {CONTEXT_TOKENS} -ub {MICRO_BATCH_TOKENS}")
    if answer.generation is None or answer.generation.finish_reason == "cancelled":
        raise Cancelled("the demo was stopped")


def _new_folder(parent: Path) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="demo-", dir=parent))
    except OSError as error:
        raise TierReadError(
            f"{parent}: cannot make a folder for the demo's model ({error.strerror}); name another with --cache-dir"
        ) from error


def _what_runs(plan: Plan) -> str:
    size = format_size(plan.model_bytes)
    if plan.mode == "streamed":
        return f"Every token takes all {size} of weights: what is not pinned is read again, just before its use."
    return f"This budget holds all {size} of weights ({plan.mode}): a smaller --memory or a larger --size would stream."

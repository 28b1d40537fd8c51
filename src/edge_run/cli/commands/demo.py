"""`edge-run demo`: a model streamed under a budget that it does not fit, before your eyes, and mmap beside it."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, Cancelled, ConfigError, KernelError, TierReadError, reason_of
from edge_run.base.results import Plan
from edge_run.base.sampling_config import SamplingConfig
from edge_run.base.units import MIB, format_size
from edge_run.cli.reports import demo_picture
from edge_run.cli.shared import figures
from edge_run.cli.shared.answer import WrittenAnswer, opened, say_figures, show
from edge_run.cli.shared.growing import grow
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.process import cleaned_up
from edge_run.cli.shared.setting import PATH, size_option
from edge_run.cli.shared.settings import model_config, report
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal
from edge_run.tiers.gguf import read_gguf

KIT = Path(__file__).parents[2] / "models" / "kit-dense-q4_0.gguf"
PROMPT = "It was a dark evening, and the old man at the door"
LAYER_BYTES, LEAST_LAYERS, MOST_LAYERS = 10 * MIB, 8, 64  # much wider layers would need large compute buffers
CONTEXT_TOKENS, MICRO_BATCH_TOKENS = 512, 64
GROWN_BYTES, GROWN_MEMORY_BYTES = 400 * MIB, 224 * MIB
COMPARED_TOKENS = 6


@click.command(
    cls=SettingsCommand,
    params=some_settings("threads", "readers", "cache_dir", "verbose"),
    short_help="See a model streamed, and mmap beside it; needs no other file.",
)
@click.option(
    "--model",
    "own_model",
    type=PATH,
    metavar="FILE",
    help="A model of yours, instead of the bundled one.",
)
@click.option(
    "--size", callback=size_option, metavar="SIZE", help="How large the bundled model is grown.  [default: 400MiB]"
)
@click.option(
    "--memory",
    callback=size_option,
    metavar="SIZE",
    help="The budget; with --model half its weights, or a tenth more than it needs.  [default: 224MiB]",
)
@click.option("-n", "--predict", type=click.IntRange(1), default=24, metavar="N", help="Tokens.  [default: 24]")
@click.option("--mmap/--no-mmap", "has_mmap", default=True, help="Run llama.cpp's mmap beside it.")
@click.option("--keep", is_flag=True, help="Keep the grown model.")
@click.pass_context
def demo(
    context: click.Context,
    /,
    own_model: Path | None,
    size: int | None,
    memory: int | None,
    predict: int,
    has_mmap: bool,
    keep: bool,
    **given: Any,
) -> None:
    """See a model run in less memory than it takes, and llama.cpp's mmap beside it: no network, no other file.

    The model that comes with edge-run is grown, on your disk, and streamed from there inside a budget that it does not
    fit; or, with --model, one of yours. As root, or in a session with memory control groups of its own, mmap then runs
    with as much memory. The grown model is removed, unless you --keep it.
    """
    if own_model and (size or keep):
        raise ConfigError("--model: is used as it is; leave out --size and --keep, which are for the bundled model")
    terminal: Terminal = context.obj
    config = model_config(
        context,
        given,
        memory=memory or GROWN_MEMORY_BYTES,
        context_tokens=CONTEXT_TOKENS,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        check_file=own_model is not None,
        embeddings=False,
    )
    report(context, terminal, config)
    with _model_file(own_model, size or GROWN_BYTES, config, keep, terminal) as model_file:
        if own_model and not memory:
            config = replace(config, memory=_half_or_least(model_file, config))
        answer = _stream(model_file, config, predict, terminal)
        if has_mmap and not answer.is_stopped:
            _compare(model_file, config, terminal)
    if answer.is_stopped:
        raise Cancelled("the demo was stopped")


@contextmanager
def _model_file(own: Path | None, size: int, config: ModelConfig, keep: bool, terminal: Terminal) -> Iterator[Path]:
    """Have the file to stream for a block: the user's own, or the bundled model, grown."""
    if own is not None:
        terminal.say(f"1. {own}: {format_size(read_gguf(own).data_bytes)} of weights.")
        yield own
        return
    folder, is_kept = _new_folder(config.cache), False
    with cleaned_up(lambda: None if is_kept else shutil.rmtree(folder, ignore_errors=True)):
        model_file = folder / "demo.gguf"
        terminal.say(
            f"1. Growing the bundled model from {format_size(KIT.stat().st_size)} to {format_size(size)}: noise that "
            "costs bytes and work, and changes nothing that the model says."
        )
        grow(KIT, model_file, size, terminal, layers=max(LEAST_LAYERS, min(MOST_LAYERS, size // LAYER_BYTES)))
        if keep:  # whatever becomes of the demo
            is_kept = True
            budget = f"--memory {config.memory} -c {CONTEXT_TOKENS} -ub {MICRO_BATCH_TOKENS}"
            terminal.say(f"Kept: edge-run {shlex.quote(str(model_file))} {budget}")
        yield model_file


def _stream(model_file: Path, config: ModelConfig, predict: int, terminal: Terminal) -> WrittenAnswer:
    """Open the model, say what goes where, and write an answer."""
    assert config.memory is not None
    memory = format_size(int(config.memory))
    terminal.say_lines(f"\n2. Opening it with {memory} of memory for the whole process. The plan:")
    with opened(model_file, config, terminal, is_quiet=True) as model:
        columns = terminal.console.width if terminal.shows_notices else None
        terminal.say_lines(figures.describe_items(model.plan, columns))
        terminal.say_lines(f"\n{demo_picture.describe_places(model.plan, _marks())}")
        terminal.say_lines(f"\n3. {_what_runs(model.plan)}\n")
        stream = model.generate(PROMPT, max_tokens=predict, sampling=SamplingConfig(temperature=0))
        answer = show(stream, model, terminal, before=PROMPT)
        terminal.say("")
        say_figures(answer, terminal)
    return answer


def _compare(model_file: Path, config: ModelConfig, terminal: Terminal) -> None:
    """Run edge-run and mmap in the same memory, and draw how fast they were; or say why not."""
    from edge_run.runtime.bench.beside_mmap import BesideMmap
    from edge_run.runtime.bench.comparison import same_tokens

    assert config.memory is not None
    memory = format_size(int(config.memory))
    with BesideMmap(model_file, config, terminal.show) as both, cleaned_up(both.close):
        if both.reason:
            terminal.say_lines(
                f"\n4. llama.cpp's mmap does not run beside it: {both.reason}. With no limit it would have all of the "
                "page cache; as root it gets as much memory as edge-run."
            )
            return
        terminal.say_lines(
            f"\n4. The same model with llama.cpp's mmap: each cold, in a memory group of {memory}, page cache included."
        )
        found = both.run(COMPARED_TOKENS)
        runs = [run for run in (found.ours, found.mmap) if run]
    terminal.say_lines(f"\n{demo_picture.describe_speeds(runs, _marks())}")
    if found.problem:
        terminal.say(f"llama.cpp's mmap: {found.problem}.")
    if same_tokens(runs) is False:
        raise KernelError(
            f"{model_file}: edge-run and llama.cpp gave DIFFERENT TOKENS under one numerics key; please report this, "
            "with what edge-run bench --json says"
        )


def _half_or_least(model_file: Path, config: ModelConfig) -> int:
    """Return half the size of the model, or where that is too little a tenth more than the least that works."""
    from edge_run.runtime.planning.plan import plan

    half = read_gguf(model_file).data_bytes // 2
    try:
        plan(model_file, config=replace(config, memory=half))
    except BudgetError as refusal:
        return refusal.minimum_bytes * 11 // 10
    return half


def _marks() -> demo_picture.Marks:
    return demo_picture.marks_for(getattr(sys.stderr, "encoding", None))


def _new_folder(parent: Path) -> Path:
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="demo-", dir=parent))
    except OSError as error:
        raise TierReadError(
            f"{parent}: cannot make a folder for the demo's model ({reason_of(error)}); name another with --cache-dir"
        ) from error


def _what_runs(plan: Plan) -> str:
    size = format_size(plan.model_bytes)
    if plan.mode == "streamed":
        return f"Every token takes all {size} of weights: what is not pinned is read again, just before its use."
    return f"This budget holds all {size} of weights ({plan.mode}): a smaller --memory or a larger --size would stream."

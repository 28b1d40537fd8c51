"""`edge-run bench`: what was predicted, what is measured, and llama.cpp's mmap beside it; or a server under load."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.errors import ConfigError, KernelError, ProtocolError
from edge_run.cli.reports import bench_plot, bench_table, load_table
from edge_run.cli.shared.options import some_settings
from edge_run.cli.shared.plot_file import PLOT, PlotFile, draw_plot
from edge_run.cli.shared.process import cleaned_up
from edge_run.cli.shared.server_options import SERVER_OPTIONS, asked_server
from edge_run.cli.shared.setting import PATH, NumberRange
from edge_run.cli.shared.settings import model_config, report
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.client.connection import ServerAddress

PROMPT_TOKENS, PREDICT_TOKENS, ROUNDS = 64, 8, 2
CLIENTS, SECONDS = 8, 30.0
MOST_CLIENTS, MOST_PROMPT_WORDS = 10_000, 1_000_000  # each client is a thread, and makes its prompts
_SETTINGS = (
    "memory", "ctx_size", "threads", "ubatch_size", "batch_size", "kv_type", "cache_type_k", "cache_type_v",
    "flash_attn", "readers", "also", "expert_policy", "expert_prefetch", "packed", "repack", "cache_dir", "json",
    "verbose",
)  # fmt: skip
_EPILOG = """
Needs root, or a session with memory control groups of its own, to give llama.cpp's mmap no more memory than edge-run
has; without, it has all of the page cache, and the output says so.
"""


def _count(name: str, *short: str, least: int, default: int, help: str, most: int | None = None) -> click.Option:
    kind = click.IntRange(least, most)
    return click.Option([*short, name], type=kind, default=default, metavar="N", help=f"{help}  [default: {default}]")


@click.command(
    cls=SettingsCommand,
    params=[
        click.Argument(["model_file"], metavar="[MODEL]", required=False, type=PATH),
        _count("--prompt-tokens", least=1, default=PROMPT_TOKENS, help="Length of the prompt: arbitrary tokens."),
        _count("--predict", "-n", least=2, default=PREDICT_TOKENS, help="Tokens after it."),
        _count("--rounds", least=1, default=ROUNDS, help="How often each is measured."),
        click.Option(["--mmap/--no-mmap", "has_mmap"], default=True, help="Measure llama.cpp's mmap too."),
        *PLOT,
        *SERVER_OPTIONS,
        _count("--clients", least=1, most=MOST_CLIENTS, default=CLIENTS, help="With --server: clients at a time."),
        click.Option(
            ["--seconds"],
            type=NumberRange(0.1, 86_400),
            default=SECONDS,
            metavar="X",
            help=f"With --server: for so long.  [default: {SECONDS}]",
        ),
        *some_settings(*_SETTINGS),
    ],
    short_help="Predict a model's speed, measure it, and compare with mmap.",
    epilog=_EPILOG,
)
@click.pass_context
def bench(context: click.Context, /, model_file: Path | None, plot: PlotFile | None, **given: Any) -> None:
    """Predict how fast the GGUF file MODEL runs here, then measure it, and llama.cpp's mmap beside it.

    Each measurement is a process of its own that finds the file cold; edge-run and llama.cpp take turns. Both must give
    the same tokens.

    With --server, so many clients at a time ask that server for text instead, each for one answer after the other;
    MODEL is the name of the model that they ask for, a token of the prompt is a word, and -n is at most.
    """
    terminal: Terminal = context.obj
    if (address := asked_server(context, given)) is not None:
        report(context, terminal)
        _bench_server(address, str(model_file or ""), given, terminal)
        return
    if model_file is None:
        raise ConfigError("model: none given; name a GGUF file, or a server with --server")
    config = model_config(context, given, embeddings=False)
    report(context, terminal, config)
    from edge_run.runtime.bench.bench import Bencher, Task

    task = Task(given["prompt_tokens"], given["predict"], given["rounds"], given["has_mmap"])
    with Bencher(model_file, config, task, terminal.show) as bencher, cleaned_up(bencher.close):
        result = bencher.run()
    columns = terminal.console.width if terminal.shows_answer else None
    terminal.write_result(result, given["json"], lambda found: bench_table.describe(found, columns))
    if result.has_same_tokens is False:
        raise KernelError(
            f"{model_file}: edge-run and llama.cpp gave DIFFERENT TOKENS under one numerics key: the figures "
            "compare nothing; please report this, with what --json says"
        )
    draw_plot(plot, lambda figure: bench_plot.draw(result, figure), terminal)


def _bench_server(address: ServerAddress, model: str, given: dict[str, Any], terminal: Terminal) -> None:
    """Measure a server under load. Raises ProtocolError where it gave no answer."""
    from edge_run.runtime.client.load import LoadTask, run_load

    if (n_words := given["prompt_tokens"]) > MOST_PROMPT_WORDS:
        raise ConfigError(f"--prompt-tokens {n_words}: must be at most {MOST_PROMPT_WORDS} with --server")
    task = LoadTask(given["clients"], given["seconds"], given["prompt_tokens"], given["predict"], model)
    found = run_load(address, task, lambda second: terminal.show(f"{second} of {task.seconds:g} s"))
    terminal.erase()
    terminal.write_result(found, given["json"], load_table.describe)
    if not found.tokens:
        raise ProtocolError(f"{address}: not a token came; {', '.join(found.messages) or 'and no error'}")

"""`edge-run batch`: a file of requests, answered many at once."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.errors import Cancelled, ConfigError
from edge_run.base.extras import CLUSTER, SERVE, need
from edge_run.base.files.folders import cache_folder
from edge_run.base.interrupt import INSISTENCE, on_ctrl_c
from edge_run.base.units import format_count
from edge_run.cli.shared.answer import NOTICE, opened
from edge_run.cli.shared.figures import describe_duration
from edge_run.cli.shared.generating import mesh_options
from edge_run.cli.shared.options import SERVED_SETTINGS, SETTINGS
from edge_run.cli.shared.process import end_with
from edge_run.cli.shared.setting import PATH
from edge_run.cli.shared.settings import RunSettings, report, resolve
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.runtime.batches.run import BatchProgress, BatchRun

_AUTO = "auto"
_STOPPED = "the batch was stopped; the same command goes on"
_PATH: dict[str, Any] = {"type": PATH, "metavar": "FILE"}


def _number(context: click.Context, parameter: click.Parameter, text: str) -> int:
    """Return the answers at once that an option asks for, 0 for as many as are best: a click callback."""
    return 0 if text == _AUTO else int(click.IntRange(1, 256)(text, parameter, context))


@click.command(
    "batch",
    cls=SettingsCommand,
    params=[
        click.Argument(["requests"], **_PATH),
        click.Option(["-m", "--model", "model_file"], required=True, help="The model.", **_PATH),
        click.Option(["-o", "--output"], required=True, help="Results; those that are there are kept.", **_PATH),
        click.Option(["--in-order"], is_flag=True, help="Results in the order of the requests."),
        click.Option(
            ["--parallel"],
            callback=_number,
            default=_AUTO,
            metavar="N",
            help="Answers that share a pass at most; auto: as many as are expected to be fastest.  [default: auto]",
        ),
        click.Option(["--dask"], metavar="ADDRESS", help="Answer on the workers of this Dask scheduler."),
        *SERVED_SETTINGS,
    ],
    short_help="Answer a file of requests.",
)
@click.pass_context
def batch(context: click.Context, /, requests: Path, model_file: Path, output: Path, **given: Any) -> None:
    """Answer the requests of FILE, a line of JSON each as OpenAI's Batch API takes them, many in each pass.

    Each result is written as soon as it is there. Whatever ends a run, the same command does what is left. Sampling
    settings are for requests that say nothing; -n is the most that an answer may have. Needs the `serve` extra, --dask
    the `cluster` extra.
    """
    need("msgspec", SERVE)
    need("starlette", SERVE)

    from edge_run.runtime.batches.input_file import count_lines, usual_tokens
    from edge_run.runtime.batches.results_file import ResultsFile
    from edge_run.runtime.batches.run import BatchProgress, BatchRun

    terminal: Terminal = context.obj
    parallel, in_order, dask = (given.pop(name) for name in ("parallel", "in_order", "dask"))
    settings = resolve(context, {**{s.name: None for s in SETTINGS}, **given, "model_file": model_file})
    if dask and settings.is_mesh:
        raise ConfigError("--dask, --mesh: exclude each other; each worker of a Dask cluster holds the whole model")
    if requests.exists() and output.exists() and requests.samefile(output):
        raise ConfigError(f"{output}: is the file of the requests; give another one for the results (-o)")
    n_lines = count_lines(requests)
    config = dataclasses.replace(settings.config, sequences=parallel)
    if not parallel:
        config = dataclasses.replace(config, request_tokens=usual_tokens(requests, settings.max_tokens))
    settings = dataclasses.replace(settings, config=config)
    report(context, terminal, settings.config, settings.sampling)
    with ResultsFile(output) as results:
        progress = BatchProgress(n_lines)
        if not results.is_locked:
            terminal.say(
                f"results {output}: the file system has no locks, so nothing keeps another run off them", NOTICE
            )

        def run(place: str = "") -> BatchRun:
            progress.began_s = progress.clock()
            show = functools.partial(_show, terminal, progress, place)
            show()
            return BatchRun(requests, results, progress, show, is_in_order=in_order)

        if dask:
            _run_on_cluster(dask, settings, terminal, run)
        else:
            _run_here(settings, terminal, run)
    terminal.say(_summary(progress, output))


def _run_here(settings: RunSettings, terminal: Terminal, run: Callable[[], BatchRun]) -> None:
    """Open the model in this process, over a mesh where that was asked for, and have it answer all."""
    import anyio

    from edge_run.runtime.batches.answering import PlacesHere

    mesh = mesh_options(settings, terminal) if settings.is_mesh else None
    with opened(settings.model, settings.config, terminal, settings.chat_template, mesh=mesh) as model:

        async def answer_all() -> None:
            async with PlacesHere.of(model, settings.sampling, settings.max_tokens) as places:
                await run().run(places)

        ending = _Ending(model.cancel)
        with on_ctrl_c(ending.end):
            anyio.run(ending.of, answer_all)


class _Ending:
    """What Ctrl-C ends: the pass at hand, and whatever else is waited for, as before the first pass.

    An answer that begins knows nothing of a pass that was cancelled before it.
    """

    def __init__(self, cancel_pass: Callable[[], None]) -> None:
        self._cancel_pass = cancel_pass
        self._cancel_waiting: Callable[[], object] = lambda: None
        self._n_times = 0

    def end(self) -> None:
        """End all: called by the signal, in the thread of the event loop, wherever that is.

        Who insists ends the process, as where a drive hangs that a pass reads; what was answered is written.
        """
        self._n_times += 1
        if self._n_times == INSISTENCE:
            end_with(f"edge-run: {_STOPPED}", Cancelled.exit_code)
        self._cancel_pass()
        self._cancel_waiting()

    async def of(self, function: Callable[[], Awaitable[None]]) -> None:
        """Await `function`. Raises Cancelled where it was ended."""
        import anyio

        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            self._cancel_waiting = lambda: loop.call_soon_threadsafe(scope.cancel)
            try:
                if self._n_times:
                    scope.cancel()
                await function()
            finally:
                self._cancel_waiting = lambda: None
        if scope.cancelled_caught:
            raise Cancelled(_STOPPED)


def _run_on_cluster(address: str, settings: RunSettings, terminal: Terminal, run: Callable[[str], BatchRun]) -> None:
    """Have the workers of a Dask cluster open the model, and answer all."""
    need("distributed", CLUSTER)
    import anyio

    from edge_run.runtime.batches.cluster import ClusterPlaces
    from edge_run.runtime.batches.cluster_host import order_of
    from edge_run.runtime.generation.chat import override_text

    if not logging.getLogger().handlers:  # without -v; what matters is said by us
        for name in ("distributed", "distributed.client"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    config = settings.config
    if config.cache_folder == cache_folder():  # nobody named one: each worker has its own
        config = dataclasses.replace(config, cache_folder=None)
    template = override_text(settings.chat_template) if settings.chat_template is not None else None
    order = order_of(settings.model, config, settings.sampling, template, settings.max_tokens)

    async def answer_all() -> None:
        async with ClusterPlaces.of(address, order, lambda text: terminal.say(f"dask: {text}", NOTICE)) as places:
            await run("on the cluster").run(places)

    anyio.run(answer_all)


def _show(terminal: Terminal, progress: BatchProgress, place: str) -> None:
    done = progress.kept + progress.done
    text = f"{done:,} of {format_count(progress.all_requests, 'request')} {place}".rstrip()
    if progress.remaining_s is not None:
        rate, left = progress.tokens_per_s, describe_duration(progress.remaining_s)
        text += f", {rate:.1f} tokens/s, about {left} to go"
    terminal.show(f"{text} (Ctrl-C stops; the same command goes on)")


def _summary(progress: BatchProgress, output: Path) -> str:
    text = f"{format_count(progress.done, 'request')} answered"
    if progress.kept:
        text += f", {progress.kept:,} were there"
    if progress.failed:
        text += f", {progress.failed:,} of them with an error"
    if progress.tokens:
        text += f"; {progress.tokens:,} tokens at {progress.tokens_per_s:.1f} a second"
    return f"{text}; results in {output}"

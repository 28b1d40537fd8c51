"""`edge-run plan`: what would go where, and how fast it would be; nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edge_run.base.config import PROMPT_TOKENS
from edge_run.base.errors import BudgetError, ContextFull
from edge_run.base.results import Forecast, Plan, Sweep
from edge_run.base.units import format_rate, format_size
from edge_run.cli.reports import forecasts
from edge_run.cli.shared.answer import NOTICE
from edge_run.cli.shared.figures import describe_context, describe_gpu, describe_items, describe_packing
from edge_run.cli.shared.options import MODEL, some_settings
from edge_run.cli.shared.settings import model_config, report
from edge_run.cli.shared.settings_command import SettingsCommand
from edge_run.cli.shared.terminal import Terminal

if TYPE_CHECKING:
    from edge_run.base.profile import DeviceProfile
    from edge_run.runtime.planning.planner import Planner
    from edge_run.tiers.gguf import GgufModel

_SETTINGS = (
    "memory", "gpu_memory", "op_offload", "ctx_size", "threads", "ubatch_size", "batch_size", "kv_type", "cache_type_k",
    "cache_type_v", "flash_attn", "readers", "also", "expert_prefetch", "packed", "repack", "cache_dir", "kv_spill",
    "kv_keep", "kv_keep_by", "context_shift", "draft", "speculate", "draft_max", "exact", "json", "verbose",
)  # fmt: skip


@click.command(
    cls=SettingsCommand,
    params=[MODEL, *some_settings(*_SETTINGS)],
    short_help="Say what would go where, and how fast it would be.",
)
@click.option(
    "--prompt-tokens", type=click.IntRange(1), metavar="N",
    help=f"Length of the prompt that is timed.  [default: {PROMPT_TOKENS}]",
)  # fmt: skip
@click.option("--sweep", is_flag=True, help="Compare budgets, from the smallest that works to the whole model.")
@click.option("--batch", "is_batch", is_flag=True, help="Plan for `edge-run batch`: many answers at once.")
@click.option("--parallel", type=click.IntRange(1, 256), metavar="N", help="Plan for N answers at once, as of serve.")
@click.option("--probe/--no-probe", "is_probed", default=True, help="Measure what is not known of this device yet.")
@click.pass_context
def plan(
    context: click.Context,
    /,
    model_file: Path,
    prompt_tokens: int | None,
    sweep: bool,
    is_batch: bool,
    parallel: int | None,
    is_probed: bool,
    **given: Any,
) -> None:
    """Plan the GGUF file MODEL: what its memory would be spent on, and how long it would take.

    Nothing is loaded. Times come from this device's profile (`edge-run probe`); what it lacks for this model is
    measured once, which takes a few seconds.
    """
    from edge_run.runtime.planning.plan import planner
    from edge_run.runtime.planning.planner import told
    from edge_run.tiers._libc import why_unavailable

    terminal: Terminal = context.obj
    config = model_config(context, given, sequences=parallel or (0 if is_batch else 1))
    report(context, terminal, config)
    if (reason := why_unavailable()) and not given["json"]:
        _show_plain(model_file, reason, terminal)
        return
    planned = planner(model_file, config, may_measure=is_probed)
    profile = _known(planned) if is_probed else None
    if is_probed and not profile and (profile := _measured(planned, model_file, terminal)):
        # It may decide what is repacked, how wide passes are, how many answers share them, and the context.
        planned = planner(model_file, config)
    if sweep:
        budgets = Sweep(tuple(_timed(planned, planned.sweep(), profile, prompt_tokens)))
        terminal.write_result(budgets, given["json"], lambda found: f"{forecasts.table(found.plans)}\n")
        return
    one = planned.timed(told(planned), profile, prompt_tokens)
    columns = terminal.console.width if terminal.shows_answer else None
    terminal.write_result(one, given["json"], lambda found: "\n".join(_paragraphs(found, planned, columns, profile)))


def _timed(
    planned: Planner, plans: Sequence[Plan], profile: DeviceProfile | None, prompt_tokens: int | None
) -> Iterator[Plan]:
    """Yield plans of ever more memory with their times; without, where the prompt has no room, but has in the last."""
    largest = planned.timed(plans[-1], profile, prompt_tokens)
    for one in plans[:-1]:
        try:
            yield planned.timed(one, profile, prompt_tokens)
        except ContextFull:
            yield one
    yield largest


def _known(planned: Planner) -> DeviceProfile | None:
    """Return what is known of this device; None where something is missing that the model needs."""
    from edge_run.runtime.probing.attention import is_ratio_missing
    from edge_run.runtime.probing.probe import recall

    return None if is_ratio_missing(planned.config) else recall(planned.gguf, planned.config)


def _measured(planned: Planner, model: Path, terminal: Terminal) -> DeviceProfile | None:
    """Measure what this device can do; None where its disk cannot be measured, which is said."""
    from edge_run.devices.host.profile import ProfileStore
    from edge_run.devices.host.scratch import NoScratchError
    from edge_run.runtime.probing.probe import probe

    terminal.say("Measuring this device for this model; it takes some seconds.", NOTICE)
    store = ProfileStore(planned.config.cache)
    try:
        has_gpu = planned.config.gpu_memory != 0
        profile = probe([], model, planned.config, on_step=terminal.show, store=store, measures_gpus=has_gpu)
    except NoScratchError as error:
        terminal.say(f"A plan without times: {error}")
        return None
    if store.problem:
        terminal.say(f"Note: {store.problem}")
    return profile


def _show_plain(model: Path, reason: str, terminal: Terminal) -> None:
    """Say what there is to say of a model that only llama.cpp's own loader can run here."""
    from edge_run.tiers.gguf import read_gguf

    terminal.write(
        f"{_what(read_gguf(model))}\n\n"
        f"llama.cpp's own loader runs it here, which keeps no budget, so there is nothing to plan: {reason}.\n"
    )


def _what(gguf: GgufModel) -> str:
    size, count = format_size(gguf.data_bytes), len(gguf.tensors)
    return f"{gguf.shards[0].path.name}: {gguf.architecture}, {size} in {count:,} tensors"


def _paragraphs(plan: Plan, planned: Planner, columns: int | None, profile: DeviceProfile | None) -> Iterator[str]:
    makes = f"embeddings (pooling {planned.config.pooling}), " if planned.config.embeddings else ""
    yield f"{_what(planned.gguf)}; {makes}{describe_context(plan)}\n"
    yield f"{forecasts.headline(plan)}\n{describe_items(plan, columns)}\n"
    if plan.kv_type_reason:
        yield f"Keys and values in {plan.kv_type_reason}.\n"
    if plan.repacked:
        yield f"{forecasts.repacked(plan)}\n"
    if planned.config.embeddings:
        if plan.forecast:
            yield f"{forecasts.describe_texts(plan, columns)}\n"
        return
    if plan.by_context:
        yield f"{forecasts.by_context(plan)}\n"
    if plan.gpu:
        yield f"{describe_gpu(plan.gpu)}.\n"
    if plan.forecast and profile:
        yield f"{forecasts.describe(plan, planned.known.micro_batch_tokens, columns)}\n"
        if plan.forecast.parallel > 1:
            yield f"{forecasts.abreast(plan.forecast)}\n"
        yield from _advice(plan, plan.forecast, planned, profile)


def _advice(plan: Plan, forecast: Forecast, planned: Planner, profile: DeviceProfile) -> Iterator[str]:
    """Say what a packed file and a wider micro-batch would give, where they would give something."""
    from edge_run.runtime.planning.planner import packed

    if found := packed(planned, plan):
        with_file = found[0].timed(found[1], profile, forecast.prompt_tokens).forecast
        if with_file and (told := describe_packing(planned.gguf.shards[0].path, plan.model_bytes, forecast, with_file)):
            yield f"{told}\n"
    for factor in (2, 4):
        wider = planned.widened(factor)
        try:
            other = wider.timed(wider.plan(plan.budget_bytes), profile, forecast.prompt_tokens).forecast
        except BudgetError:
            return
        if other and other.prefill_tokens_per_s > 1.1 * forecast.prefill_tokens_per_s:
            yield (
                f"A micro-batch of {wider.known.micro_batch_tokens:,} tokens (-ub) would read prompts at "
                f"{format_rate(other.prefill_tokens_per_s)}, and decode at {format_rate(other.decode_tokens_per_s)}; "
                "the last bits of the logits may change.\n"
            )
            return

"""Plans and figures in words, for the line before an answer and those after it. Pure: results in, text out."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from edge_run.base.results import (
    ExpertUse,
    Forecast,
    Generation,
    GpuPlan,
    IoUse,
    KvSpill,
    MemoryUse,
    Plan,
    Progress,
    Stats,
    TuningDecision,
)
from edge_run.base.units import format_count, format_rate, format_size
from edge_run.cli.shared.tables import with_reasons

if TYPE_CHECKING:
    from edge_run.runtime.embedding.results import Embeddings, EmbeddingShape


WORTH_PACKING = 1.1  # times as fast


def describe_plan(name: str, plan: Plan) -> str:
    """Return what was decided about the model file `name`, as a sentence."""
    model = f"{name}, {format_size(plan.model_bytes)}"
    context = describe_context(plan) + (f"; {describe_gpu(plan.gpu)}" if plan.gpu else "")
    lent = f"{format_size(plan.lent_bytes)} more at first, " if plan.lent_bytes else ""
    if plan.mode == "streamed":
        return (
            f"{model}: streamed inside {format_size(plan.budget_bytes)}: {format_size(plan.pinned_bytes)} pinned, "
            f"{lent}a window of {format_size(plan.window_bytes)}, {format_size(plan.streamed_bytes_per_pass)} read per "
            f"token; {context}"
        )
    if plan.mode == "resident":
        return f"{model}: fits {format_size(plan.budget_bytes)}, all of it stays in memory; {context}"
    return f"{model}: with llama.cpp's own loader, no budget is kept; {context}"


def describe_embedding(name: str, plan: Plan, shape: EmbeddingShape) -> str:
    """Return what was decided about the model file `name`, which makes vectors of texts, as a sentence."""
    model = f"{name}, {format_size(plan.model_bytes)}"
    texts = (
        f"texts of up to {shape.longest_text_tokens:,} tokens, {shape.width:,} numbers each (pooling {shape.pooling})"
    )
    if plan.mode == "streamed":
        return (
            f"{model}: streamed inside {format_size(plan.budget_bytes)}: {format_size(plan.pinned_bytes)} pinned, a "
            f"window of {format_size(plan.window_bytes)}, {format_size(plan.streamed_bytes_per_batch)} read per pass; "
            f"{texts}"
        )
    where = f"fits {format_size(plan.budget_bytes)}" if plan.mode == "resident" else "with llama.cpp's own loader"
    return f"{model}: {where}; {texts}"


def describe_embeddings(found: Embeddings, load_s: float) -> str:
    """Return what the vectors of texts cost."""
    texts, tokens = format_count(len(found.tokens), "text"), sum(found.tokens)
    passes = f"{found.passes:,} pass" + "es" * (found.passes > 1)
    speed = format_rate(tokens / found.wall_s) if found.wall_s else ""
    budget = f" of {format_size(found.memory.budget_bytes)}" if found.plan.mode != "llama.cpp" else ""
    return (
        f"{texts}, {tokens:,} tokens at {speed} in {passes}; read {format_size(found.bytes_read)}; memory at most "
        f"{format_size(found.memory.peak_bytes)}{budget}; opened in {load_s:.2f} s"
    )


def describe_context(plan: Plan) -> str:
    """Return how long the context is, as a part of a sentence."""
    context = f"context of {plan.context_tokens:,} tokens"
    if plan.context_tokens < plan.wanted_context_tokens:
        context += f", as the budget has no room for {plan.wanted_context_tokens:,}"
    if plan.spilled_kv_bytes:
        context += f"; {format_size(plan.spilled_kv_bytes)} of its keys and values will be in a file when it is full"
    return context


def describe_gpu(gpu: GpuPlan) -> str:
    """Return what lies on a GPU, as a sentence."""
    sizes = ("weights", gpu.weights_bytes), ("keys and values", gpu.kv_bytes), ("buffers", gpu.buffer_bytes)
    parts = ", ".join(f"{format_size(size)} of {what}" for what, size in sizes)
    narrow = f", {gpu.narrow_layers} of them without their widest weights" if gpu.narrow_layers else ""
    layers = f"{gpu.layers - 1} layers and the output" if gpu.layers > 1 else "the output"
    wide = "; passes of many tokens run there whole" if gpu.op_offload else ""
    return f"{gpu.device} has {layers}{narrow}: {parts}, within {format_size(gpu.budget_bytes)}{wide}"


def describe_items(plan: Plan, columns: int | None) -> str:
    """Return the plan as a table; its reasons are wrapped at `columns`, and left out where there is no room."""
    items = [(item.what, format_size(item.size_bytes), item.reason) for item in plan.items]
    total = format_size(sum(item.size_bytes for item in plan.items))
    items.append(("in all", total, f"of a budget of {format_size(plan.budget_bytes)}"))
    return "\n".join(with_reasons(items, columns))


def describe_wait(plan: Plan, progress: Progress | None) -> str:
    """Return what is shown until the first token comes."""
    if progress is None:
        return "Waiting for the first token (Ctrl-C stops)"
    text = "Reading the prompt"
    if progress.stage == "reading":
        text = f"Reading {format_size(plan.model_bytes)} of weights for the first time"
    if progress.all_tokens > 1:
        text += f", {progress.done_tokens:,} of {progress.all_tokens:,} tokens"
    if progress.share:
        text += f", {progress.share:.0%}"
    if progress.remaining_s is not None:
        text += f", about {describe_duration(progress.remaining_s)} to go"
    return f"{text} (Ctrl-C stops)"


def describe_duration(seconds: float) -> str:
    """Return how long something takes, roughly."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def describe_speed(generation: Generation) -> str:
    """Return how fast an answer came."""
    parts = [format_count(generation.completion_tokens, "token")]
    if generation.decode_tokens_per_s:
        parts[0] += f" at {format_rate(generation.decode_tokens_per_s)}"
    if generation.speculation.passes:
        parts.append(f"{generation.speculation.tokens_per_pass:.3g} tokens a pass")
    if generation.ttft_s:
        parts.append(f"the first after {generation.ttft_s:.2f} s")
    fed_tokens = generation.prompt_tokens - generation.cached_tokens
    prompt = f"prompt of {fed_tokens:,} at {format_rate(generation.prefill_tokens_per_s)}"
    if generation.cached_tokens:
        prompt += f" ({generation.cached_tokens:,} were cached)"
    return ", ".join([*parts, prompt])


def describe_use(plan: Plan, memory: MemoryUse, io: IoUse, load_s: float) -> str:
    """Return what was read and held."""
    parts = []
    if io.bytes_read:
        reading = f"read {format_size(io.bytes_read)}"
        if io.bandwidth_bytes_per_s:  # none where all came from the page cache, beside the passes
            reading += f" at {format_size(io.bandwidth_bytes_per_s)}/s"
        if io.bytes_per_token:
            reading += f", {format_size(io.bytes_per_token)} per token, {io.efficiency:.0%} of the physical limit"
        parts.append(reading)
    if io.cached_bytes:
        parts.append(f"{format_size(io.cached_bytes)} of it from the page cache")
    if io.copy_bytes:
        repeated = f", {format_count(io.repeated_reads, 'read')} done again" * (io.repeated_reads > 0)
        parts.append(f"{format_size(io.copy_bytes)} of it from the copy{repeated}")
    budget = f" of {format_size(memory.budget_bytes)}" if plan.mode != "llama.cpp" else ""
    parts.append(f"memory at most {format_size(memory.peak_bytes)}{budget}")
    parts.append(f"opened in {load_s:.2f} s")
    return "; ".join(parts)


def describe_experts(use: ExpertUse | None) -> list[str]:
    """Return how experts were streamed, and what was found about it; nothing for other models."""
    if use is None or not use.tokens:
        return []
    text = f"experts: {use.hit_rate:.0%} of what a token needs was in memory"
    if use.prefetched_bytes:
        text += (
            f"; read ahead {format_size(use.prefetched_bytes)}, {use.unused_bytes / use.prefetched_bytes:.0%} in vain"
        )
    return [text, *map(describe_decision, use.decisions)]


def describe_spill(use: KvSpill | None) -> list[str]:
    """Return what keys and values that had no room took; nothing where all had."""
    if use is None or not use.written_bytes:
        return []
    return [
        f"keys and values: {format_size(use.away_bytes)} have no room in memory; {format_size(use.written_bytes)} "
        f"written, {format_size(use.read_bytes)} read back since the model was opened"
    ]


def describe_decision(decision: TuningDecision) -> str:
    """Return what a comparison of two settings found."""
    between = f"{decision.gain_low:+.1%} to {decision.gain_high:+.1%}, {decision.confidence:.0%} sure"
    return (
        f"{decision.tunable} {decision.tried}, tried for {decision.tokens} tokens: {decision.gain:+.1%} ({between}); "
        f"so it is {decision.setting}"
    )


def describe_end(generation: Generation, when_full: str = "") -> str:
    """Return why an answer ended, where that is not plain to see; an empty string where it is.

    when_full: what can be done where the context is full, besides giving it more room.
    """
    if generation.finish_reason == "context":
        plan = generation.plan
        more = "more fits with -c" if plan.context_tokens >= plan.wanted_context_tokens else "more fits with --memory"
        advice = f"{when_full}; {more}" if when_full else more
        return f"The context of {plan.context_tokens:,} tokens is full: the answer ends here; {advice}."
    if generation.finish_reason == "cancelled":
        return "Stopped."
    if generation.shifted_tokens:
        return (
            f"The context was full: {generation.shifted_tokens:,} tokens were taken out of it (--context-shift); what "
            "came after is not what the model gives for the text that was left."
        )
    return ""


def describe_stats(plan: Plan, stats: Stats) -> list[str]:
    """Return the figures of all answers so far."""
    return [
        f"{format_count(stats.generations, 'answer')}, {format_count(stats.completion_tokens, 'token')}; "
        f"prompts of {format_count(stats.prompt_tokens, 'token')}",
        describe_use(plan, stats.memory, stats.io, stats.load_s),
        *describe_experts(stats.experts),
        *describe_spill(stats.kv_spill),
    ]


def describe_packing(model: Path, size_bytes: int, found: Forecast, packed: Forecast) -> str:
    """Return what `edge-run pack` would gain, as a sentence; empty where that is little.

    size_bytes: of the file that it would write. packed: with that file.
    """
    gains = [
        ("prompts", packed.prefill_tokens_per_s, found.prefill_tokens_per_s),
        ("an answer", packed.decode_tokens_per_s, found.decode_tokens_per_s),
        (f"{found.parallel} answers at once", packed.parallel_tokens_per_s, found.parallel_tokens_per_s),
    ]
    times = [(what, after / before) for what, after, before in gains if before and after / before >= WORTH_PACKING]
    if not times:
        return ""
    told = ", ".join(f"{what} {ratio:.1f} times" for what, ratio in times)
    name = shlex.quote(str(model))
    return (
        f"`edge-run pack {name}` once, which writes about {format_size(size_bytes)} beside it, is expected to make it "
        f"faster: {told}."
    )

"""Plans and their times in words: what `edge-run plan` writes. Pure: results in, text out."""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.base.results import Forecast, Plan
from edge_run.base.units import format_rate, format_size
from edge_run.cli.shared.tables import align, with_reasons


def headline(plan: Plan) -> str:
    """Return what was decided, as a sentence."""
    budget = format_size(plan.budget_bytes)
    passes = f"with passes of {plan.micro_batch_tokens:,} tokens"
    smallest = f"the smallest budget that works {passes} is {format_size(plan.minimum_bytes)}"
    if plan.mode == "streamed":
        return f"Inside {budget} it is streamed; {smallest}:"
    return f"Inside {budget} all of it stays in memory:"


def repacked(plan: Plan) -> str:
    """Return which weights are repacked."""
    return f"Repacked for kernels that compute several rows at once: {', '.join(plan.repacked)} (type/row length)."


def describe(plan: Plan, micro_batch_tokens: int, columns: int | None) -> str:
    """Return the times that are expected, each with its reason, wrapped at `columns`."""
    forecast = plan.forecast
    assert forecast is not None
    passes = -(-forecast.prompt_tokens // micro_batch_tokens)
    prompt = f"a prompt of {forecast.prompt_tokens:,} tokens in {passes} pass{'es' if passes > 1 else ''}"
    if forecast.limit == "disk":
        read = format_size(forecast.read_bytes_per_token)
        reason = (
            f"reading {read} takes {_seconds(forecast.read_s_per_token)}, "
            f"computing {_seconds(forecast.compute_s_per_token)}: the disk decides"
        )
    else:
        reason = f"computing takes {_seconds(forecast.compute_s_per_token)}"
        if forecast.read_s_per_token:
            reason += f", reading {_seconds(forecast.read_s_per_token)} beside it"
    prompt_speed, answer_speed = format_rate(forecast.prefill_tokens_per_s), format_rate(forecast.decode_tokens_per_s)
    rows = [
        ("opening", _seconds(forecast.load_s), "header, vocabulary and an empty context"),
        ("first token", _seconds(forecast.first_token_s), f"{prompt}; the first one reads the whole model"),
        ("prompt", prompt_speed, "of another one, when the model has been read"),
        ("answer", answer_speed, reason),
    ]
    return "\n".join(["Expected on this device:", *with_reasons(rows, columns)])


def describe_texts(plan: Plan, columns: int | None) -> str:
    """Return the same of a model that makes vectors of texts."""
    forecast = plan.forecast
    assert forecast is not None
    tokens, passes = forecast.prompt_tokens, -(-forecast.prompt_tokens // plan.micro_batch_tokens)
    first = f"texts of {tokens:,} tokens in {passes} pass{'es' if passes > 1 else ''}; these read the whole model"
    rows = [
        ("opening", _seconds(forecast.load_s), "header, vocabulary and an empty context"),
        ("first texts", _seconds(forecast.first_token_s), first),
        ("texts", format_rate(forecast.prefill_tokens_per_s), "of others, when the model has been read"),
    ]
    return "\n".join(["Expected on this device:", *with_reasons(rows, columns)])


def abreast(forecast: Forecast) -> str:
    """Return what answers at once make together, as a sentence."""
    together, alone = forecast.parallel_tokens_per_s, forecast.decode_tokens_per_s
    return f"{forecast.parallel} answers at once make {format_rate(together)} together" + (
        f", {together / alone:.1f} times one alone." if alone else "."
    )


def by_context(plan: Plan) -> str:
    """Return what is held and read while the context fills, one line for each length; empty where nothing changes."""
    if not plan.by_context:
        return ""
    is_timed = any(point.decode_tokens_per_s for point in plan.by_context)
    spilled = ("and keys and values",) if plan.spilled_kv_bytes else ()
    rows: list[tuple[str, ...]] = [
        ("tokens in the context", "weights held", "read per token", *spilled, "answer" * is_timed)
    ]
    for point in plan.by_context:
        speed = format_rate(point.decode_tokens_per_s) if is_timed else ""
        sizes = (format_size(point.weights_bytes), format_size(point.streamed_bytes_per_pass))
        kv = (format_size(point.kv_bytes_per_pass),) if spilled else ()
        rows.append((f"{point.tokens:,}", *sizes, *kv, speed))
    what = "Keys, values and buffers that are not in use hold weights meanwhile:"
    return "\n".join([what, *align(rows, str.rjust)])


def table(plans: Sequence[Plan]) -> str:
    """Return plans under several budgets, one on a line."""
    rows: list[tuple[str, ...]] = [("budget", "mode", "pinned", "read per token", "first token", "prompt", "answer")]
    for plan in plans:
        forecast = plan.forecast
        times: tuple[str, ...] = ("", "", "")
        if forecast:
            speeds = (forecast.prefill_tokens_per_s, forecast.decode_tokens_per_s)
            times = (_seconds(forecast.first_token_s), *(format_rate(speed) for speed in speeds))
        sizes = (format_size(plan.pinned_bytes), format_size(plan.streamed_bytes_per_pass))
        rows.append((format_size(plan.budget_bytes), plan.mode, *sizes, *times))
    return "\n".join(align(rows, str.rjust))


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds / 60:.1f} min"

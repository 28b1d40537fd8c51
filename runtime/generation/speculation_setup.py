"""Which drafters a conversation gets, and why it does without."""

from __future__ import annotations

from edge_run.base.errors import NotSupported
from edge_run.runtime.decoding.context_shift import ContextShift
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.pass_costs import pass_costs
from edge_run.runtime.speculation.drafting import Drafter
from edge_run.runtime.speculation.lookup import Lookup
from edge_run.runtime.speculation.overlap import Overlap
from edge_run.runtime.speculation.session import SpeculativeSession
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.width_control import LEAST_GAIN, LEAST_GAIN_BY_EXPERT, WidthControl


def open_session(engine: Engine) -> Session:
    """Return a conversation in `engine`, which speculates as the engine's configuration says, where the model can."""
    config, capabilities = engine.config, engine.front.capabilities
    drafters: list[Drafter] = [Overlap(engine.draft)] if engine.draft else []
    if config.uses_lookup:
        drafters.append(Lookup())
    if not drafters:
        return Session(engine.front, shift=_context_shift(engine))
    if config.exact and config.sequences > 1:
        return Session(engine.front, why_plain="exact answers in shared passes are not guessed at")
    if not capabilities.can_rewind:
        return Session(engine.front, why_plain="the model's recurrent state cannot be cut: it does not speculate")
    control = WidthControl(
        pass_costs(engine),
        min(config.draft_tokens + 1, capabilities.outputs_per_pass, capabilities.micro_batch_tokens),
        LEAST_GAIN_BY_EXPERT if engine.plan.expert_bytes else LEAST_GAIN,
    )
    mode = "+".join(["draft"] * bool(engine.draft) + ["ngram"] * config.uses_lookup)
    return SpeculativeSession(
        engine.front,
        drafters,
        control,
        SpeculationTally(mode, _limits(engine), is_exact=config.exact),
        branches=range(config.sequences, config.sequences + config.branches) if capabilities.can_branch else (),
        is_exact=config.exact,
        counters=lambda: _counters(engine),
    )


def _context_shift(engine: Engine) -> ContextShift | None:
    if not engine.config.context_shift:
        return None
    if why := engine.decoder.why_no_shift:
        raise NotSupported(f"context shift: {why}, or leave out --context-shift")
    return ContextShift(engine.decoder, engine.config.context_keep_tokens)


def _counters(engine: Engine) -> tuple[float, float, int]:
    totals = engine.read_totals
    return engine.wait_s, totals.busy_s, totals.bytes_read


def _limits(engine: Engine) -> str:
    """Return what keeps speculation from doing all it could; empty for nothing."""
    draft, room = engine.draft, engine.front.capabilities.context_tokens
    limits = []
    if engine.model.sliding_window_tokens:
        limits.append("this model's cache cannot branch: guesses are a chain, not a tree")
    elif engine.config.spills_kv:
        limits.append("with --kv-spill guesses are a chain, not a tree")
    if draft and draft.context_tokens < room:
        limits.append(
            f"the draft model's context has {draft.context_tokens:,} tokens, the model's {room:,}: beyond "
            "the shorter one it does not guess"
        )
    return "; ".join(limits)

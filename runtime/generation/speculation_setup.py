"""Which drafters a conversation gets, or the answers that share passes, and why they do without."""

from __future__ import annotations

from edge_run.base.errors import NotSupported, option
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.decoding.context_shift import ContextShift
from edge_run.runtime.decoding.padding import LEAST_TOKENS
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.engine.pass_costs import pass_costs
from edge_run.runtime.speculation.session import SpeculativeSession
from edge_run.runtime.speculation.shared_drafters import SharedDrafters
from edge_run.runtime.speculation.shared_guesses import SharedGuesses
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.width_control import LEAST_GAIN, LEAST_GAIN_BY_EXPERT, WidthControl

_RECURRENT = "the model's recurrent state cannot be cut here: it does not speculate"


def open_session(engine: Engine) -> Session:
    """Return a conversation in `engine`, which speculates as the engine's configuration says, where the model can."""
    session = _new_session(engine)
    engine.decoder.keeps_whole_passes = session.keeps_whole_passes = engine.front is engine.decoder
    return session


def _new_session(engine: Engine) -> Session:
    config = engine.config
    if not (engine.draft or config.uses_lookup):
        return Session(engine.front, shift=_context_shift(engine))
    capabilities = engine.front.capabilities
    if not (capabilities.can_rewind or capabilities.rollback_tokens):
        return Session(engine.front, why_plain=_RECURRENT)
    guesses = SharedGuesses(
        _control(engine, pass_costs(engine), min(config.draft_tokens + 1, _most_tokens(engine))),
        *_counted_and_made(engine),
        config.draft_tokens,
        branches=_branches(engine),
    )
    return SpeculativeSession(engine.front, guesses, is_exact=config.exact, counters=lambda: _counters(engine))


def _control(engine: Engine, costs: WidthCosts, most_tokens: int) -> WidthControl:
    control = WidthControl(costs, most_tokens, _least_gain(engine))
    control.first_trial_passes = float(engine.draft is not None)
    draft = engine.draft
    if draft and draft.weights and draft.weights.on_leave:
        control.rest, size_bytes = draft.rest, draft.weights.size_bytes
        control.rested_share = size_bytes / max(size_bytes, engine.plan.streamed_bytes_per_pass)
    return control


def _context_shift(engine: Engine) -> ContextShift | None:
    if not engine.config.context_shift:
        return None
    if why := engine.decoder.why_no_shift:
        raise NotSupported(f"context shift: {why}, or leave out {option('context_shift')}")
    return ContextShift(
        engine.decoder,
        engine.config.context_keep_tokens,
        engine.front.capabilities.context_tokens,
        adds_bos=engine.model.adds_bos,
    )


def open_shared_guesses(engine: Engine, costs: WidthCosts) -> tuple[SharedGuesses | None, str]:
    """Return the guesses of answers that share the passes of `engine`, or why there are none.

    costs: of its passes; whoever computes them notes there what they took.
    """
    config = engine.config
    if not engine.draft and not config.uses_lookup:
        return None, ""
    if not engine.front.capabilities.can_rewind:
        return None, _RECURRENT
    guesses = SharedGuesses(
        _control(engine, costs, _most_tokens(engine)),
        *_counted_and_made(engine),
        config.draft_tokens,
        branches=() if config.exact else _branches(engine),  # only what lies in the order of the text is exact
        least_tokens=LEAST_TOKENS if config.exact else int(engine.shape.has_streams),
    )
    return guesses, ""


def _counted_and_made(engine: Engine) -> tuple[SpeculationTally, SharedDrafters]:
    """Return what counts the guesses, and what makes them."""
    uses_lookup = engine.config.uses_lookup
    mode = "+".join(["draft"] * bool(engine.draft) + ["ngram"] * uses_lookup)
    tally = SpeculationTally(mode, _limits(engine), is_exact=engine.config.exact)
    return tally, SharedDrafters(engine.draft, uses_lookup=uses_lookup)


def _most_tokens(engine: Engine) -> int:
    """Return how many tokens a pass may have that verifies guesses."""
    capabilities = engine.front.capabilities
    most = min(capabilities.outputs_per_pass, capabilities.micro_batch_tokens)
    return most if capabilities.can_rewind else min(most, capabilities.rollback_tokens + 1)


def _least_gain(engine: Engine) -> float:
    return LEAST_GAIN_BY_EXPERT if engine.plan.expert_bytes else LEAST_GAIN


def _branches(engine: Engine) -> range:
    """Return the sequences for branches of trees; none where guesses must be chains."""
    n_texts = engine.config.sequences
    return range(n_texts, n_texts + engine.config.branches * engine.front.capabilities.can_branch)


def _counters(engine: Engine) -> tuple[float, float, int]:
    totals = engine.read_totals
    return engine.wait_s, totals.busy_s, totals.bytes_read


def _limits(engine: Engine) -> str:
    """Return what keeps speculation from doing all it could; empty for nothing."""
    draft, room = engine.draft, engine.front.capabilities.context_tokens
    limits = []
    if engine.model.sliding_window_tokens:
        limits.append("this model's cache cannot branch: guesses are a chain, not a tree")
    elif engine.front.capabilities.rollback_tokens:
        n_tokens = engine.front.capabilities.rollback_tokens
        limits.append(f"recurrent state can be cut by {n_tokens} tokens: guesses are a chain of {n_tokens} at most")
    elif engine.config.spills_kv:
        limits.append("keys and values may be in a file: guesses are a chain, not a tree")
    if draft and draft.is_translated:
        limits.append("the draft model's vocabulary is another one: guesses go through text")
    if draft and draft.context_tokens < room:
        limits.append(
            f"the draft model's context has {draft.context_tokens:,} tokens, the model's {room:,}: beyond "
            "the shorter one it does not guess"
        )
    return "; ".join(limits)

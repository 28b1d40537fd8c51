"""The figures of a finished answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_run.base.results import Generation, Speculation
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.meter import Interval, Meter


@dataclass(slots=True)
class Course:
    """How an answer went.

    cached_tokens: the tokens of its prompt that were there already.
    ttft_s: from its start to its first token.
    prefill, decode: what its prompt and its tokens cost, where passes are shared its part of them.
    prefill_s, decode_s: how long they took, shared or not.
    shifted_tokens: those that were taken out of the context meanwhile, to make room.
    """

    cached_tokens: int = 0
    ttft_s: float = 0.0
    prefill: Interval = field(default_factory=Interval)
    decode: Interval = field(default_factory=Interval)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    shifted_tokens: int = 0

    def prefilled(self, lap: Interval, share: float = 1.0, passed_s: float | None = None) -> None:
        """The prompt was computed, or some of it, in a pass that cost `lap`; `share` of the pass was for it.

        passed_s: how long it took, where others were in flight at the same time; None: as long as what it cost.
        """
        self.prefill += lap.part(share)
        self.prefill_s += lap.wall_s if passed_s is None else passed_s

    def decoded(self, lap: Interval, share: float = 1.0, passed_s: float | None = None) -> None:
        """A token was computed, in a pass that cost `lap`; `share` of the pass was for it. passed_s: as above."""
        self.decode += lap.part(share)
        self.decode_s += lap.wall_s if passed_s is None else passed_s


def report(
    engine: Engine,
    meter: Meter,
    answer: Continuation,
    course: Course,
    reason: str,
    speculation: Speculation,
) -> Generation:
    """Return the figures of `answer`, which ended for `reason`, and count it in `meter`."""
    n_prompt, n_tokens = len(answer.prompt), len(answer.tokens)
    fed, decoded = n_prompt - course.cached_tokens, max(0, n_tokens - 1)
    meter.count(n_prompt, n_tokens, course.decode)
    meant = answer.meaning
    return Generation(
        text=answer.text,
        token_ids=tuple(answer.tokens),
        finish_reason="tool_calls" if meant.calls and reason == "stop" else reason,
        seed=answer.seed,
        prompt_tokens=n_prompt,
        cached_tokens=course.cached_tokens,
        completion_tokens=n_tokens,
        load_s=engine.load_s,
        ttft_s=course.ttft_s,
        prefill_tokens_per_s=fed / course.prefill_s if course.prefill_s else 0.0,
        decode_tokens_per_s=decoded / course.decode_s if course.decode_s else 0.0,
        memory=engine.memory_use,
        io=meter.io_use(course.prefill + course.decode, course.decode, decoded),
        numerics=engine.numerics,
        plan=engine.plan,
        backend=engine.backend,
        experts=engine.expert_use,
        speculation=speculation,
        mesh=engine.mesh_use,
        logprobs=tuple(answer.logprobs),
        kv_spill=engine.kv_spill,
        kv_keep=engine.kv_keep,
        dropped_messages=answer.dropped_messages,
        shifted_tokens=course.shifted_tokens,
        stop_text=answer.stop_text,
        tool_calls=meant.calls,
        content=meant.content,
        reasoning=meant.reasoning,
    )

"""One answer as it comes: tokens chosen, turned into text, stopped where it ends, and measured."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Sequence

from edge_run.base.config import SamplingConfig
from edge_run.base.errors import Cancelled
from edge_run.base.protocols import Logits
from edge_run.base.results import Generation, Piece
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.grammar_room import GrammarRoom
from edge_run.runtime.generation.meter import Interval, Meter
from edge_run.runtime.generation.sampling import Sampler
from edge_run.runtime.generation.text import TextStream
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.processes.forks import OwnerProcess


class Stream:
    """An iterator of `Piece`s; the last one carries the `Generation`. Not thread-safe. `close` ends it early.

    It keeps the model open that it comes from, so `Model(path).generate(...)` needs no name for the model.
    """

    def __init__(self, owner: object, answer: Answer, owner_process: OwnerProcess) -> None:
        self._owner, self._answer, self._owner_process = owner, answer, owner_process
        self._pieces = answer.run()
        weakref.finalize(self, answer.close)

    @property
    def generation(self) -> Generation | None:
        """The finished answer with its figures; None before the last piece."""
        return self._answer.generation

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        self._owner_process.check("this answer")
        return next(self._pieces)

    def result(self) -> Generation:
        """Run to the end and return the finished answer with its figures."""
        for _ in self:
            pass
        if self.generation is None:
            raise Cancelled("the generation was ended before it finished")
        return self.generation

    def close(self) -> None:
        """End the answer here; what it has said stays in the conversation. Idempotent."""
        self._pieces.close()
        self._answer.close()


class Answer:
    """An answer in the making: what a `Stream` iterates over, without a reference to it."""

    def __init__(
        self,
        engine: Engine,
        session: Session,
        meter: Meter,
        prompt: Sequence[int],
        max_tokens: int | None,
        sampling: SamplingConfig,
        room: GrammarRoom | None = None,
    ) -> None:
        """Prepare to continue `prompt`; nothing is computed before `run`. room: where its grammar runs.

        Raises ConfigError for a bad grammar.
        """
        self._engine, self._session, self._meter = engine, session, meter
        self._prompt = prompt
        tokens = engine.front.capabilities.context_tokens
        self._max_tokens = tokens if max_tokens is None else max_tokens
        self._sampler = Sampler(engine.model.vocab, sampling, engine.model.vocabulary, tokens, room)
        self._text = TextStream(sampling.stop)
        self._tokens: list[int] = []
        self._written: list[str] = []
        self.generation: Generation | None = None

    def close(self) -> None:
        """Free the sampler. Idempotent."""
        self._sampler.close()

    def run(self) -> Generator[Piece, None, None]:
        """Compute the answer piece by piece, once."""
        cached, prefill, decode, ttft_s, reason = 0, Interval(), Interval(), 0.0, "cancelled"
        self._meter.lap()
        with self._sampler as sampler:
            try:
                if self._engine.interrupt.is_set:
                    raise Cancelled("the generation was cancelled before it began")
                sampler.prime(self._prompt)
                logits, cached = self._session.feed(self._prompt)
                prefill = self._meter.lap()
                while (token := self._next_token(sampler, logits)) is not None:
                    ttft_s = ttft_s or prefill.wall_s + self._meter.lap().wall_s
                    yield Piece(self._push(token), (token,))
                    if reason_to_stop := self._why_stop():
                        reason = reason_to_stop
                        break
                    self._meter.lap()
                    logits = self._session.step(token)
                    decode += self._meter.lap()
                else:
                    reason = "stop" if self._max_tokens else "length"
            except Cancelled:
                reason = "cancelled"
        self._session.finish()
        rest = self._text.finish()
        if self._text.is_stopped:
            reason = "stop"
        self._written.append(rest)
        self.generation = self._report(reason, cached, prefill, decode, ttft_s)
        yield Piece(rest, (), self.generation)

    def _next_token(self, sampler: Sampler, logits: Logits) -> int | None:
        if not self._max_tokens:
            return None
        token = sampler.choose(logits)
        sampler.accept(token)
        return None if L.llama_vocab_is_eog(self._engine.model.vocab, token) else token

    def _push(self, token: int) -> str:
        self._tokens.append(token)
        text = self._text.push(ggml.token_bytes(self._engine.model.vocab, token, False))
        self._written.append(text)
        return text

    def _why_stop(self) -> str:
        if self._text.is_stopped:
            return "stop"
        if self._engine.interrupt.is_set:
            return "cancelled"
        if len(self._tokens) >= self._max_tokens:
            return "length"
        return "context" if self._session.is_full else ""

    def _report(self, reason: str, cached: int, prefill: Interval, decode: Interval, ttft_s: float) -> Generation:
        engine, fed = self._engine, len(self._prompt) - cached
        decoded = max(0, len(self._tokens) - 1)
        self._meter.count(len(self._prompt), len(self._tokens), decode)
        return Generation(
            text="".join(self._written),
            token_ids=tuple(self._tokens),
            finish_reason=reason,
            seed=self._sampler.seed,
            prompt_tokens=len(self._prompt),
            cached_tokens=cached,
            completion_tokens=len(self._tokens),
            load_s=engine.load_s,
            ttft_s=ttft_s,
            prefill_tokens_per_s=fed / prefill.wall_s if prefill.wall_s else 0.0,
            decode_tokens_per_s=decoded / decode.wall_s if decode.wall_s else 0.0,
            memory=engine.memory_use,
            io=self._meter.io_use(prefill + decode, decode, decoded),
            numerics=engine.numerics,
            plan=engine.plan,
            backend=engine.backend,
            experts=engine.expert_use,
            speculation=self._session.speculation(),
            mesh=engine.mesh_use,
        )

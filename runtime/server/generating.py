"""A request as the model sees it, and its answers as they come: the same for every API."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial

from edge_run.base.errors import Cancelled
from edge_run.base.results import Generation, TokenLogprobs, ToolCall
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.output import Delta, MakeParser, PlainOutput
from edge_run.runtime.generation.async_model import AsyncModel
from edge_run.runtime.llama.prompt_text import check_room
from edge_run.runtime.server.tasks import task_group

_SEEDS = 2**32 - 1
MOST_PROBABILITIES = 1 << 18  # of a request: each takes 100 bytes, and four times that as it is written


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be generated.

    tokens: of the prompt. choices: how many answers to it. others: further prompts, with as many answers each.
    parser: makes what parses an answer. key: whose request it is. salt: what was computed for it serves those of the
    same key and salt only. marks: control tokens that are a part of the text.
    """

    tokens: Sequence[int]
    sampling: SamplingConfig
    max_tokens: int | None = None
    choices: int = 1
    parser: MakeParser = PlainOutput
    key: str = ""
    marks: Sequence[str] = ()
    salt: str = ""
    others: Sequence[Sequence[int]] = ()

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The tokens of all prompts."""
        return (self.tokens, *self.others)

    @property
    def n_answers(self) -> int:
        """How many answers there are, those to the first prompt first."""
        return self.choices * len(self.prompts)

    @property
    def most_tokens(self) -> int | None:
        """How many tokens an answer may have: where others are told of with each, MOST_PROBABILITIES bound them all."""
        if (n_others := self.sampling.top_logprobs) is None:
            return self.max_tokens
        room = MOST_PROBABILITIES // ((1 + n_others) * self.n_answers)
        return room if self.max_tokens is None else min(room, self.max_tokens)

    @property
    def has_grammar(self) -> bool:
        """Whether the answers follow a grammar or a schema: what is wrong with it is known once it is opened."""
        return bool(self.sampling.grammar or self.sampling.json_schema)

    def check(self, context_tokens: int) -> None:
        """Raise ContextFull where a prompt leaves no room for a token."""
        check_room(max(map(len, self.prompts)), context_tokens)


@dataclass(slots=True)
class FinishedAnswer:
    """A finished answer. reasoning_tokens: those that came with its reasoning."""

    generation: Generation
    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    reasoning_tokens: int = 0

    @property
    def finish(self) -> str:
        """Why it ended, in OpenAI's words: `stop`, `length` or `tool_calls`."""
        if self.generation.finish_reason in ("length", "context"):
            return "length"
        return "tool_calls" if self.calls else "stop"


Take = Callable[[int, Delta], None]
Read = Callable[[int, int, int], None]
_numbers = itertools.count()  # of requests without a key


async def generate(
    model: AsyncModel,
    job: Job,
    take: Take,
    count: Callable[[int], None],
    read: Read | None = None,
    *,
    one_by_one: bool = False,
) -> list[FinishedAnswer]:
    """Generate the answers of a job at once, or one by one; return them in order.

    take: told what the answer of a number goes on by. count: told how many tokens have come, each time that some do.
    read: told, in the model's thread, how many tokens the prompt of an answer has, and how many of them are read.
    Raises what `Model.generate` raises, Cancelled where the model was closed or cancelled meanwhile.

    Keys have equal shares of the tokens; a request without one has a share of its own, so that one with many prompts
    does not hold up the others.
    """
    outcomes: dict[int, FinishedAnswer] = {}
    prompts = [tuple(prompt) for prompt in job.prompts]  # which all answers share
    share = job.key or f"request {next(_numbers)}"

    async def answer(number: int) -> None:
        outcomes[number] = await _answer(model, job, prompts[number // job.choices], number, share, take, count, read)

    if one_by_one or job.n_answers == 1:
        for number in range(job.n_answers):
            await answer(number)
    else:
        async with task_group() as group:
            for number in range(job.n_answers):
                group.start_soon(answer, number, name=f"edge-run-choice-{number}")
    return [outcomes[number] for number in range(job.n_answers)]


async def _answer(
    model: AsyncModel,
    job: Job,
    prompt: Sequence[int],
    number: int,
    share: str,
    take: Take,
    count: Callable[[int], None],
    read: Read | None,
) -> FinishedAnswer:
    sampling, choice = job.sampling, number % job.choices
    if sampling.seed is not None and choice:
        sampling = dataclasses.replace(sampling, seed=(sampling.seed + choice) % _SEEDS)
    parser, deltas, generation = job.parser(), list[Delta](), None
    tokens, logprobs = list[int](), list[TokenLogprobs]()  # of text that is held back

    def tell(delta: Delta) -> None:
        told = dataclasses.replace(delta, logprobs=tuple(logprobs), tokens=tuple(tokens))
        logprobs.clear()
        tokens.clear()
        deltas.append(told)
        take(number, told)

    stream = model.generate(
        prompt,
        max_tokens=job.most_tokens,
        sampling=sampling,
        key=share,
        salt=f"{job.key}{job.salt}",
        marks=tuple(job.marks),
        on_read=partial(read, number, len(prompt)) if read else None,
    )
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            count(len(piece.token_ids))
            tokens += piece.token_ids
            if piece.logprobs:
                logprobs.append(piece.logprobs)
            for delta in parser.push(piece.text):
                tell(delta)
            generation = piece.generation
    if generation is None or generation.finish_reason == "cancelled":
        raise Cancelled("the answer was ended before it was finished")
    for delta in parser.finish():
        tell(delta)
    if tokens:  # of a stop string, or of what no text came of
        tell(Delta())
    return FinishedAnswer(
        generation,
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [delta.call for delta in deltas if delta.call],
        sum(len(delta.tokens) for delta in deltas if delta.reasoning),
    )

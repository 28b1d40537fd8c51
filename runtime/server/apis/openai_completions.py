"""`/v1/completions`, as OpenAI has it."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.output import Delta
from edge_run.runtime.server.answers import AnswerForm, AnswerResponse, event
from edge_run.runtime.server.apis.gaps import gap_tokens
from edge_run.runtime.server.apis.openai_chat import DONE, Choices, StreamOptions
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import FinishedAnswer, Job
from edge_run.runtime.server.logprobs import Letters, Spell, text_logprobs
from edge_run.runtime.server.refusals import Refusal, openai_error
from edge_run.runtime.server.sampling_fields import (
    MOST_TOKENS,
    Count,
    FormedFields,
    Name,
    TopLogprobs,
    first_given,
    refuse_set,
)
from edge_run.runtime.server.service import Service
from edge_run.runtime.server.usage import openai_usage, timings

MOST_ANSWERS = 64  # of all prompts of a request together
QUICK_TOKENS = 1 << 14  # that are checked at once, which takes a millisecond, and not behind others' templates
USUAL_TOKENS = 16  # OpenAI's, of a completion that says no number
Token = Annotated[int, Meta(ge=0, le=MOST_TOKENS)]


class CompletionRequest(FormedFields, kw_only=True):
    """A text to be continued."""

    prompt: str | list[str | Token | list[Token]]
    cache_salt: Name | None = None
    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    best_of: int | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    return_progress: bool = False

    def sampling(self, defaults: SamplingConfig) -> SamplingConfig:
        """Return how tokens are chosen. Raises Refusal."""
        return self.sampling_with(defaults, self.schema(), self.logprobs)

    def check(self) -> None:
        """Raise Refusal for what cannot be served."""
        refuse_set(self, "echo")
        if (self.best_of or 1) > (self.n or 1):
            raise Refusal(400, "best_of: more answers than n are not made", param="best_of")


async def completions(service: Service, request: Request) -> AnswerResponse:
    """Continue a text."""
    asked = await service.read(request, CompletionRequest)
    asked.check()
    entry, sampling = service.catalogue.asked(asked.model), asked.sampling(service.defaults.sampling)
    form = CompletionForm(entry.name, asked)
    return AnswerResponse(service, entry, partial(completion_job, asked, sampling), form, bool(asked.stream))


async def completion_job(asked: CompletionRequest, sampling: SamplingConfig, served: ServedModel) -> Job:
    """Return what is to be generated for a request that was checked. Raises Refusal, and errors of ours."""
    most = first_given(asked.max_completion_tokens, asked.max_tokens, USUAL_TOKENS)
    first, *others = await _prompts_of(served, asked.prompt, asked.suffix)
    choices = asked.n or 1
    check_answers(choices * (1 + len(others)))
    salt = served.salt(asked.cache_salt)
    return Job(first, sampling, served.limit(most), choices, salt=salt, others=others)


def check_answers(n_answers: int) -> None:
    """Raise Refusal where a request wants so many answers."""
    if n_answers > MOST_ANSWERS:
        raise Refusal(400, f"prompt: more than {MOST_ANSWERS} answers in one request", param="prompt")


async def _prompts_of(
    served: ServedModel, prompt: str | Sequence[str | int | list[int]], suffix: str | None
) -> list[list[int]]:
    """Return the tokens of each prompt: one, or a list of texts or of lists of tokens. Raises Refusal.

    suffix: what comes behind the answer, where it is to fill a gap.
    """
    is_one = isinstance(prompt, str) or not prompt or any(isinstance(part, int) for part in prompt)
    parts: Sequence[Any] = [prompt] if is_one else prompt
    if len(parts) > MOST_ANSWERS:
        raise Refusal(400, f"prompt: more than {MOST_ANSWERS} prompts in one request", param="prompt")
    if not all(isinstance(part, str) or (part and all(isinstance(token, int) for token in part)) for part in parts):
        raise Refusal(400, "prompt: must be one text, or a list of tokens", param="prompt")
    if suffix:
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise Refusal(400, "prompt: must be text, where there is a suffix", param="prompt")
        return [await served.prepare(gap_tokens, served.model, text, suffix) for text in texts]
    given = [token for part in parts if not isinstance(part, str) for token in part]
    if len(given) > QUICK_TOKENS:
        await served.prepare(served.model.check_tokens, "prompt", given)
    elif given:
        served.model.check_tokens("prompt", given)
    return [await served.prompt_tokens(part) if isinstance(part, str) else part for part in parts]


class CompletionForm(AnswerForm):
    """Text completions and their chunks."""

    def __init__(self, name: str, asked: CompletionRequest) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        self._has_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._choices, self.wants_progress = asked.n or 1, asked.return_progress
        self._spell: Spell
        self._letters = defaultdict[int, Letters](Letters)  # of each choice

    def begin(self, served: ServedModel, job: Job) -> bytes:
        """Return nothing: the text is all there is."""
        self._head["system_fingerprint"] = served.fingerprint
        self._spell = served.model.token_bytes
        return b""

    def piece(self, number: int, delta: Delta) -> bytes:
        """Return a chunk."""
        logprobs = text_logprobs(delta.logprobs, self._spell, self._letters[number])
        says = delta.content or logprobs
        return self._chunk([_choice(number, delta.content, logprobs=logprobs)]) if says else b""

    def end(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return why each choice ended, the usage where it was asked for, and the end of the stream."""
        frames = [self._chunk([_choice(number, "", outcome.finish)]) for number, outcome in enumerate(outcomes)]
        if self._has_usage:
            frames.append(self._chunk([], usage=openai_usage(outcomes, self._choices)))
        return b"".join(frames) + DONE

    def failed(self, refusal: Refusal) -> bytes:
        """Return the error, which is the end of the stream."""
        return event(openai_error(refusal)) + DONE

    def progress(self, number: int, said: Mapping[str, Any]) -> bytes:
        """Return a chunk of llama-server's kind."""
        return self._chunk([_choice(number, "")], prompt_progress=said)

    def whole(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return a text completion."""
        choices = [
            _choice(number, one.content, one.finish, text_logprobs(one.generation.logprobs, self._spell, Letters()))
            for number, one in enumerate(outcomes)
        ]
        rest = {"usage": openai_usage(outcomes, self._choices), "timings": timings(outcomes[0].generation)}
        return msgspec.json.encode({**self._head, "choices": choices, **rest})

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._has_usage else {}
        return event({**self._head, "choices": choices, **usage, **more})


def _choice(
    number: int, text: str, finish: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": number, "text": text, "logprobs": logprobs, "finish_reason": finish}

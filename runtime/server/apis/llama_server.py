"""What llama-server has besides: completions in its own words, gaps, tokens, templates, what it says of itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from edge_run.base.sampling_config import MOST_TOP_LOGPROBS, SamplingConfig
from edge_run.runtime.formats.output import Delta
from edge_run.runtime.generation.model import Model
from edge_run.runtime.llama.prompt_text import check_room
from edge_run.runtime.server.answers import AnswerForm, AnswerResponse, event, json_response
from edge_run.runtime.server.apis.gaps import MOST_LETTERS, Gap, OtherPiece, infill_tokens
from edge_run.runtime.server.apis.openai_chat import ChatRequest, Choices
from edge_run.runtime.server.apis.openai_completions import MOST_ANSWERS, Token, check_answers
from edge_run.runtime.server.catalogue.served_model import ServedModel
from edge_run.runtime.server.generating import FinishedAnswer, Job
from edge_run.runtime.server.logprobs import Spell, native_probabilities
from edge_run.runtime.server.refusals import Refusal, openai_error
from edge_run.runtime.server.sampling_fields import (
    Count,
    Name,
    SamplingFields,
    first_given,
    refuse_set,
    schema_text,
)
from edge_run.runtime.server.service import Service
from edge_run.runtime.server.usage import timings

MOST_PIECES = 1 << 17  # of text, for as many tokens: 300 bytes each
MOST_FIELDS = 64  # of an answer, that are named


class PromptObject(msgspec.Struct):
    """A prompt of text, which could have pictures besides."""

    prompt_string: str
    multimodal_data: list[Any] | None = None


class NativeRequest(SamplingFields, kw_only=True):
    """What requests for text say in llama-server's own words."""

    model: Name | None = None
    n_predict: Count | None = None
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    n_cmpl: Choices | None = None
    n: Choices | None = None
    cache_salt: Name | None = None
    stream: bool = False
    json_schema: dict[str, Any] | None = None
    return_progress: bool = False
    return_tokens: bool = False
    n_probs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] = 0
    post_sampling_probs: bool | None = None
    image_data: list[Any] | None = None
    response_fields: Annotated[list[Name], Meta(max_length=MOST_FIELDS)] | None = None

    def check(self) -> None:
        """Raise Refusal for what cannot be served."""
        refuse_set(self, "post_sampling_probs", "image_data")

    def sampling(self, defaults: SamplingConfig) -> SamplingConfig:
        """Return how tokens are chosen. Raises Refusal."""
        schema = None if self.json_schema is None else schema_text(self.json_schema, "json_schema")
        return self.sampling_with(defaults, schema, self.n_probs or None)

    @property
    def most_tokens(self) -> int | None:
        """How many tokens an answer may have; None where nothing is said."""
        return first_given(self.n_predict, self.max_completion_tokens, self.max_tokens)


class NativeCompletionRequest(NativeRequest, kw_only=True):
    """Texts to be continued.

    prompt: a text, or a list that is one prompt of texts and tokens where a token is in it, and else several prompts.
    """

    prompt: str | PromptObject | list[str | Token | PromptObject | list[str | Token]]

    async def prompts(self, served: ServedModel) -> list[list[int]]:
        """Return the tokens of each prompt. Raises Refusal, and what `ServedModel.prompt_tokens` raises."""
        given = self.prompt
        if not isinstance(given, list) or any(isinstance(part, int) for part in given):
            return [await served.prepare(_prompt_tokens, served.model, given)]
        if not 0 < len(given) <= MOST_ANSWERS:
            raise Refusal(400, f"prompt: {len(given)} prompts, must be 1 to {MOST_ANSWERS}", param="prompt")
        return [await served.prepare(_prompt_tokens, served.model, part) for part in given if not isinstance(part, int)]


class InfillRequest(NativeRequest, kw_only=True):
    """A gap to be filled, as editors ask. prompt: the line of the cursor, up to the cursor."""

    input_prefix: str
    input_suffix: str
    input_extra: list[OtherPiece] | None = None
    prompt: str = ""

    async def prompts(self, served: ServedModel) -> list[list[int]]:
        """Return the tokens of the one prompt. Raises Refusal."""
        gap = Gap(self.input_prefix, self.input_suffix, self.prompt, self.input_extra or ())
        return [await served.prepare(infill_tokens, served.model, gap, served.limit(self.most_tokens))]


class TokenizeRequest(msgspec.Struct):
    """A text to be turned into tokens."""

    content: Annotated[str, Meta(max_length=MOST_LETTERS)]
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False
    model: Name | None = None


class DetokenizeRequest(msgspec.Struct):
    """Tokens to be turned into text."""

    tokens: Annotated[list[Token], Meta(max_length=MOST_PIECES)]
    model: Name | None = None


async def completion(service: Service, request: Request) -> AnswerResponse:
    """Continue texts."""
    return _answered(service, await service.read(request, NativeCompletionRequest))


async def infill(service: Service, request: Request) -> AnswerResponse:
    """Fill a gap between two texts."""
    return _answered(service, await service.read(request, InfillRequest))


def _answered(service: Service, asked: NativeCompletionRequest | InfillRequest) -> AnswerResponse:
    asked.check()
    entry, sampling = service.catalogue.asked(asked.model), asked.sampling(service.defaults.sampling)
    form = NativeCompletionForm(entry.name, asked.return_tokens, asked.return_progress, asked.response_fields)
    return AnswerResponse(service, entry, partial(native_job, asked, sampling), form, asked.stream)


async def native_job(
    asked: NativeCompletionRequest | InfillRequest, sampling: SamplingConfig, served: ServedModel
) -> Job:
    """Return what is to be generated for a request that was checked. Raises Refusal, and errors of ours."""
    salt, choices = served.salt(asked.cache_salt), asked.n_cmpl or asked.n or 1
    first, *others = await asked.prompts(served)
    check_answers(choices * (1 + len(others)))
    return Job(first, sampling, served.limit(asked.most_tokens), choices, salt=salt, others=others)


def _prompt_tokens(model: Model, prompt: str | PromptObject | Sequence[Any]) -> list[int]:
    """Return the tokens of one prompt; of texts among tokens, the first begins as a prompt does. Takes its time."""
    if isinstance(prompt, PromptObject):
        refuse_set(prompt, "multimodal_data")
        prompt = prompt.prompt_string
    if isinstance(prompt, str):
        return model.prompt_tokens(prompt)
    n_letters = sum(len(part) for part in prompt if isinstance(part, str))
    if n_letters > MOST_LETTERS:
        message = f"prompt: {n_letters:,} letters among tokens, {MOST_LETTERS:,} are the most"
        raise Refusal(400, message, param="prompt")
    tokens: list[int] = []
    for index, part in enumerate(prompt):
        if isinstance(part, int):
            tokens.append(part)
        elif not isinstance(part, str):
            raise Refusal(400, f"prompt[{index}]: must be a text or a token, among tokens", param=f"prompt[{index}]")
        elif index == 0:
            tokens += model.prompt_tokens(part)
        elif part:
            tokens += model.tokenize(part, add_special=False, parse_special=True)
        if isinstance(part, str):
            check_room(len(tokens), model.context_tokens)  # before more texts are turned into tokens
    if not tokens:
        raise Refusal(400, "prompt: has no tokens", param="prompt")
    model.check_tokens("prompt", tokens)
    return tokens


async def tokenize(service: Service, request: Request) -> Response:
    """Return the tokens of a text."""
    asked = await service.read(request, TokenizeRequest)

    def tokens_of(model: Model) -> list[Any]:
        tokens = model.tokenize(asked.content, add_special=asked.add_special, parse_special=asked.parse_special)
        if not asked.with_pieces:
            return list(tokens)
        if len(tokens) > MOST_PIECES:
            raise Refusal(
                400, f"content: has {len(tokens):,} tokens, with pieces {MOST_PIECES:,} at most", param="content"
            )
        return [{"id": token, "piece": _piece(model.token_bytes(token, has_control=True))} for token in tokens]

    async with service.visit(service.catalogue.asked(asked.model), request) as served:
        return json_response({"tokens": await served.prepare(tokens_of, served.model)})


async def detokenize(service: Service, request: Request) -> Response:
    """Return the text of tokens."""
    asked = await service.read(request, DetokenizeRequest)
    async with service.visit(service.catalogue.asked(asked.model), request) as served:
        text_of = partial(served.model.detokenize, has_control=True)
        return json_response({"content": await served.prepare(text_of, asked.tokens)})


async def apply_template(service: Service, request: Request) -> Response:
    """Return the text that a conversation becomes."""
    asked = await service.read(request, ChatRequest)
    async with service.visit(service.catalogue.asked(asked.model), request) as served:
        task = await served.prepare(asked.task)
        return json_response({"prompt": await task.prompt(served)})


async def props(service: Service, request: Request) -> Response:
    """Describe the server, and the model that is open."""
    served, defaults = await service.look(request), service.defaults
    n_ctx = served.model.context_tokens if served else 0
    settings = {"n_ctx": n_ctx, "params": _parameters(defaults.sampling, defaults.most_tokens)}
    return json_response(
        {
            "default_generation_settings": settings,
            "total_slots": served.model.most_parallel if served else 0,
            "model_path": f"{served.name}.gguf" if served else "",  # not where it is: that is nobody's business
            "model_alias": served.name if served else "",
            "chat_template": served.model.chat_template if served else "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"edge-run {service.version}",
        }
    )


async def slots(service: Service, request: Request) -> Response:
    """Say how many are being answered: answers that share passes have no place of their own, so the first ones are.

    Raises Refusal where all are and the request wants that to be said so.
    """
    if (served := await service.look(request)) is None:
        return json_response([])
    n_busy = service.admission.n_running + service.admission.n_waiting  # whose prompt is read has a slot too
    n_ctx, n_slots = served.model.context_tokens, served.model.most_parallel
    if request.query_params.get("fail_on_no_slot") and n_busy >= n_slots:
        raise Refusal(503, "no slot available", kind="unavailable_error")
    return json_response([{"id": n, "n_ctx": n_ctx, "is_processing": n < n_busy} for n in range(n_slots)])


class NativeCompletionForm(AnswerForm):
    """Completions as llama-server writes them."""

    def __init__(self, name: str, has_tokens: bool, wants_progress: bool, fields: Sequence[str] | None = None) -> None:
        """fields: what a document has, of all that it could have; `a/b` is the `b` of its `a`."""
        self._name, self._has_tokens, self.wants_progress = name, has_tokens, wants_progress
        self._fields = fields
        self._job: Job
        self._spell: Spell

    def begin(self, served: ServedModel, job: Job) -> bytes:
        """Return nothing: the text is all there is."""
        self._job, self._spell = job, served.model.token_bytes
        return b""

    def piece(self, number: int, delta: Delta) -> bytes:
        """Return a piece of the text."""
        piece = {"index": number, "content": delta.content, "tokens": delta.tokens, "stop": False}
        return event({**piece, **native_probabilities(delta.logprobs, self._spell)})

    def end(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return why each ended, and what it took; the pieces have named the tokens."""
        documents = [self._document(number, outcome, "", ()) for number, outcome in enumerate(outcomes)]
        return b"".join(map(event, documents))

    def failed(self, refusal: Refusal) -> bytes:
        """Return the error."""
        return event(openai_error(refusal))

    def progress(self, number: int, said: Mapping[str, Any]) -> bytes:
        """Return how far the prompt is."""
        return event({"index": number, "content": "", "tokens": [], "stop": False, "prompt_progress": said})

    def whole(self, outcomes: Sequence[FinishedAnswer]) -> bytes:
        """Return the answer."""
        documents = [
            {
                **self._document(number, outcome, outcome.content, outcome.generation.token_ids),
                **native_probabilities(outcome.generation.logprobs, self._spell),
            }
            for number, outcome in enumerate(outcomes)
        ]
        if self._fields:
            documents = [{field: value for field in self._fields for value in _values(one, field)} for one in documents]
        return msgspec.json.encode(documents if len(documents) > 1 else documents[0])

    def _document(self, number: int, outcome: FinishedAnswer, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        generation = outcome.generation
        return {
            "index": number,
            "content": content,
            "tokens": tokens if self._has_tokens else [],
            "id_slot": 0,
            "has_new_line": "\n" in outcome.content,
            "stop": True,
            "model": self._name,
            "tokens_predicted": generation.completion_tokens,
            "tokens_evaluated": generation.prompt_tokens,
            "tokens_cached": generation.prompt_tokens + max(0, generation.completion_tokens - 1),
            "truncated": generation.finish_reason == "context" or generation.shifted_tokens > 0,
            "stop_type": _stop_type(outcome),
            "stopping_word": outcome.generation.stop_text,
            "generation_settings": {**_parameters(self._job.sampling, self._job.max_tokens), "seed": generation.seed},
            "timings": timings(generation),
        }


def _values(document: Mapping[str, Any], field: str) -> list[Any]:
    """Return the value of a field, `a/b` for the `b` of its `a`; none where there is none."""
    found: Any = document
    for name in field.split("/"):
        if not isinstance(found, Mapping) or name not in found:
            return []
        found = found[name]
    return [found]


def _stop_type(outcome: FinishedAnswer) -> str:
    if outcome.finish == "length":
        return "limit"
    return "word" if outcome.generation.stop_text else "eos"


def _parameters(sampling: SamplingConfig, max_tokens: int | None) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "ignore_eos": sampling.ignore_eos,
        "stop": list(sampling.stop),
        "n_predict": -1 if max_tokens is None else max_tokens,
    }


def _piece(token: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes where it is a part of a character: as llama-server has it."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return list(token)

"""What requests of several APIs say about sampling, with the bounds of each number."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from edge_run.base.errors import ConfigError
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.formats.bounded_json import MOST_SCHEMA_LETTERS, bounded_json
from edge_run.runtime.formats.tools import TOOL_NAME
from edge_run.runtime.server.refusals import Refusal

MOST_TOKENS = 2**31 - 1
MOST_CHOICES = 16
MOST_STOPS, MOST_STOP_LETTERS = 64, 1024
_SEEDS = 2**32 - 1
_LEAST_TOP_P = 1e-6  # of which only the best token is left

Count = Annotated[int, Meta(ge=-1, le=MOST_TOKENS)]
Share = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=1000)]
Penalty = Annotated[float, Meta(gt=0, le=1000)]
TokenPenalty = Annotated[float, Meta(ge=-2, le=2)]
TokenId = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
Bias = Annotated[float, Meta(ge=-100, le=100)]
MOST_BIASES = 1024
Biases = (
    Annotated[dict[TokenId, Bias | bool], Meta(max_length=MOST_BIASES)]
    | Annotated[list[tuple[Annotated[int, Meta(ge=0, le=10**9)], Bias | bool]], Meta(max_length=MOST_BIASES)]
)  # of OpenAI, and of llama-server, where false bans a token
TopLogprobs = Annotated[int, Meta(ge=0, le=20)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Meta(max_length=MOST_STOP_LETTERS)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)]
Name = Annotated[str, Meta(max_length=256)]
ToolName = Annotated[str, Meta(pattern=TOOL_NAME)]


class JsonSchema(msgspec.Struct):
    """What OpenAI calls `json_schema`."""

    schema: dict[str, Any] | None = None
    name: Name | None = None


class ResponseFormat(msgspec.Struct):
    """What form the answer has: `text`, `json_object` or `json_schema`. schema: llama-server's way to give one."""

    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None

    def text(self, param: str = "response_format", schema_name: str = "json_schema") -> str | None:
        """Return the JSON schema that the answer must follow, as text; None for any text. Raises Refusal.

        param: where this is in the request. schema_name: where in this the schema is.
        """
        if self.type == "text":
            return None
        if self.type not in ("json_object", "json_schema"):
            raise Refusal(400, f"{param}.type: {self.type[:40]!r} is none of ours", param=f"{param}.type")
        schema = self.json_schema.schema if self.json_schema else self.schema
        if schema is None and self.type == "json_schema":
            place = f"{param}.{schema_name}"
            raise Refusal(400, f"{place}: a schema is missing", param=place)
        return schema_text(schema or {"type": "object"}, param)


class SamplingFields(msgspec.Struct, kw_only=True):
    """What OpenAI, llama-server and vLLM call how tokens are chosen. None is: as the server was started."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Count | None = None
    min_p: Share | None = None
    repeat_penalty: Penalty | None = None
    repeat_last_n: Count | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    frequency_penalty: TokenPenalty | None = None
    presence_penalty: TokenPenalty | None = None
    logit_bias: Biases | None = None
    grammar: Annotated[str, Meta(max_length=MOST_SCHEMA_LETTERS)] | None = None
    ignore_eos: bool | None = None

    def sampling_with(
        self, defaults: SamplingConfig, json_schema: str | None = None, top_logprobs: int | None = None
    ) -> SamplingConfig:
        """Return how tokens are chosen. Raises Refusal.

        json_schema: what the answer must follow. top_logprobs: how many likely tokens are told of; None: nothing is.
        """
        if self.grammar and json_schema:
            raise Refusal(400, "grammar and a JSON schema: give one of the two", param="grammar")
        return sampling_of(
            defaults,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            repeat_last_n=self.repeat_last_n,
            seed=self.seed,
            stop=self.stop,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            logit_bias=_biases(self.logit_bias or {}) or None,
            grammar=self.grammar,
            ignore_eos=self.ignore_eos,
            json_schema=json_schema,
            top_logprobs=top_logprobs,
        )


def _biases(given: Biases) -> dict[int, float]:
    """Return what is added to the logits of tokens; false bans one. Raises Refusal."""
    pairs = [*given.items()] if isinstance(given, dict) else given
    if any(bias is True for _, bias in pairs):
        raise Refusal(400, "logit_bias: must be a number, or false", param="logit_bias")
    return {int(token): -math.inf if bias is False else float(bias) for token, bias in pairs}


class FormedFields(SamplingFields, kw_only=True):
    """Sampling, and the form of the answer: in OpenAI's words, or llama-server's, which count where both are given."""

    response_format: ResponseFormat | None = None
    json_schema: dict[str, Any] | None = None

    def schema(self) -> str | None:
        """Return the JSON schema that the answer must follow, as text. Raises Refusal."""
        if self.json_schema is not None:
            return schema_text(self.json_schema, "json_schema")
        return self.response_format.text() if self.response_format else None


def sampling_of(
    defaults: SamplingConfig,
    *,
    seed: int | None = None,
    stop: str | Sequence[str] | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    **given: Any,
) -> SamplingConfig:
    """Return `defaults` with what was given (not None), in the words of APIs: a seed of -1 is any, a top k too.

    llama.cpp writes that seed as 2**32 - 1 too. Raises Refusal for what cannot be.
    """
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    said: dict[str, Any] = {
        "seed": None if seed is None else seed % _SEEDS,
        "stop": tuple(text for text in stops if text) or None,  # clients that mean none send an empty one
        "top_k": None if top_k is None else max(0, top_k),
        "top_p": None if top_p is None else max(_LEAST_TOP_P, top_p),
        **{name: value or None if name in ("grammar", "json_schema") else value for name, value in given.items()},
    }
    chosen = {name: value for name, value in said.items() if value is not None}
    if seed in (-1, _SEEDS):
        chosen["seed"] = None
    try:
        return dataclasses.replace(defaults, **chosen)
    except ConfigError as error:
        raise Refusal(400, str(error)) from None


def schema_text(schema: dict[str, Any], param: str) -> str:
    """Return a JSON schema as text. Raises Refusal for a long one."""
    try:
        return bounded_json(schema, param)
    except ConfigError as error:
        raise Refusal(400, str(error), param=param) from None


def first_given(*numbers: int | None) -> int | None:
    """Return the first of these that a request says; None where it says none."""
    return next((number for number in numbers if number is not None), None)


def refuse_set(fields: msgspec.Struct, *names: str) -> None:
    """Raise Refusal where one of these fields asks for something: it has a value that is not empty, zero or false."""
    for name in names:
        if getattr(fields, name):
            raise unsupported(name)


def unsupported(param: str, why: str = "is not supported here") -> Refusal:
    """Return the refusal of a parameter that is right but cannot be served."""
    return Refusal(400, f"{param}: {why}", param=param, code="unsupported_parameter")

"""Vectors of texts, as OpenAI, llama-server and Ollama have them; and who is told that they are elsewhere."""

from __future__ import annotations

import base64
import dataclasses
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.types import ASGIApp

from edge_run.base.protocols import Text
from edge_run.runtime.embedding.results import EmbeddingShape, Vector
from edge_run.runtime.server.answers import json_response
from edge_run.runtime.server.apis.embedding_response import Computed, EmbeddingResponse, WantedVectors
from edge_run.runtime.server.apis.keep_alive import KeepAlive, rest_s
from edge_run.runtime.server.apis.openai_completions import Token
from edge_run.runtime.server.refusals import Refusal
from edge_run.runtime.server.sampling_fields import Name, refuse_set, unsupported
from edge_run.runtime.server.service import Service

MOST_TEXTS = 2048  # OpenAI's
_NANOSECONDS = 1e9
_EUCLIDEAN = 2  # llama-server's number; -1 is none

Tokens = Annotated[list[Token], Meta(max_length=1 << 20)]
Texts = str | Annotated[list[str | Token | Tokens], Meta(max_length=1 << 20)]


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Texts whose vectors are wanted, as OpenAI's clients ask."""

    input: Texts
    model: Name | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class NativeEmbeddingRequest(msgspec.Struct, kw_only=True):
    """The same in llama-server's words."""

    content: Texts | None = None
    input: Texts | None = None
    embd_normalize: Literal[2, -1] = 2
    image_data: list[Any] | None = None


class OllamaEmbedRequest(msgspec.Struct, kw_only=True):
    """The same in Ollama's."""

    input: Texts | None = None
    model: Name | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=1 << 20)] | None = None
    keep_alive: KeepAlive = None


class OllamaEmbeddingsRequest(msgspec.Struct, kw_only=True):
    """The same of one text, in Ollama's older words."""

    prompt: str | None = None
    model: Name | None = None
    keep_alive: KeepAlive = None


async def embeddings(service: Service, request: Request) -> ASGIApp:
    """Return the vectors of texts."""
    asked = await service.read(request, EmbeddingRequest)
    entry, dimensions = service.catalogue.asked(asked.model), asked.dimensions

    def begin(shape: EmbeddingShape) -> None:  # keeps nothing of `asked`, which may be large
        if shape.pooling == "none":
            raise Refusal(400, "the model gives a vector for each token, which /embeddings has", code="not_supported")
        _check_dimensions(dimensions, shape.width)

    def document(computed: Computed) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": rows[0]}
            for index, rows in enumerate(computed.of_texts)
        ]
        usage = {"prompt_tokens": computed.tokens, "total_tokens": computed.tokens}
        return {"object": "list", "data": data, "model": entry.name, "usage": usage}

    wanted = WantedVectors(_texts(asked.input, "input"), begin=begin)
    if asked.encoding_format == "base64":
        wanted = dataclasses.replace(wanted, encode=_base64)
    return EmbeddingResponse(service, entry, wanted, document)


async def native_embeddings(service: Service, request: Request) -> ASGIApp:
    """Return the vectors of texts as llama-server does, also a vector for each token."""
    asked = await service.read(request, NativeEmbeddingRequest)
    refuse_set(asked, "image_data")
    name, given = ("input", asked.input) if asked.input is not None else ("content", asked.content)
    if given is None:
        raise Refusal(400, "input or content: is missing", param="input")

    def document(computed: Computed) -> list[dict[str, Any]]:
        return [{"index": index, "embedding": rows} for index, rows in enumerate(computed.of_texts)]

    is_normalized = asked.embd_normalize == _EUCLIDEAN
    wanted = WantedVectors(_texts(given, name), is_normalized=is_normalized, keeps_token_lengths=True)
    return EmbeddingResponse(service, service.catalogue.asked(None), wanted, document)


async def ollama_embed(service: Service, request: Request) -> ASGIApp:
    """Return the vectors of texts as Ollama does; texts that are too long are cut unless that is forbidden."""
    asked = await service.read(request, OllamaEmbedRequest)
    entry, keep_s = service.catalogue.asked(asked.model), rest_s(asked.keep_alive)
    dimensions = asked.dimensions or None

    def begin(shape: EmbeddingShape) -> None:
        _check_dimensions(dimensions, shape.width)
        service.catalogue.keep_open(keep_s)

    def document(computed: Computed) -> dict[str, Any]:
        return {
            "model": entry.name,
            "embeddings": [vector for rows in computed.of_texts for vector in rows],
            "total_duration": round(computed.seconds * _NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": computed.tokens,
        }

    if not asked.input:
        return json_response(document(Computed([], 0, 0.0)))
    wanted = WantedVectors(_texts(asked.input, "input"), truncate=asked.truncate is not False, begin=begin)
    return EmbeddingResponse(service, entry, wanted, document)


async def ollama_embeddings(service: Service, request: Request) -> ASGIApp:
    """Return the vector of a text, with the length that it has, as Ollama's older path does."""
    asked = await service.read(request, OllamaEmbeddingsRequest)
    keep_s = rest_s(asked.keep_alive)
    if not asked.prompt:
        return json_response({"embedding": []})
    wanted = WantedVectors(
        asked.prompt, truncate=True, is_normalized=False, begin=lambda shape: service.catalogue.keep_open(keep_s)
    )
    return EmbeddingResponse(
        service,
        service.catalogue.asked(asked.model),
        wanted,
        lambda computed: {"embedding": computed.of_texts[0][0]},
    )


def _texts(given: Texts, name: str) -> Text | list[Text]:
    """Return what a request gives as texts: one, one as tokens, or several of both kinds. Raises Refusal."""
    if isinstance(given, str):
        return given
    tokens = [part for part in given if isinstance(part, int)]
    if len(tokens) == len(given) and given:
        return tokens
    texts = [part for part in given if not isinstance(part, int)]
    if tokens or not texts:
        raise Refusal(400, f"{name}: must be a text, a list of texts, or tokens", param=name)
    if len(texts) > MOST_TEXTS:
        raise Refusal(400, f"{name}: {len(texts):,} texts, a request may have {MOST_TEXTS:,}", param=name)
    return list[Text](texts)


def _check_dimensions(asked: int | None, width: int) -> None:
    """Raise Refusal for shorter vectors: no file says whether its model was trained for them."""
    if asked is not None and asked != width:
        raise unsupported(
            "dimensions", f"the vectors have {width} numbers; where the model was trained for that, cut them yourself"
        )


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()

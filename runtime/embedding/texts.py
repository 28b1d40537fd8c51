"""Texts to the tokens that a model for embeddings gets: how many at most, and what of a longer text is left."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from edge_run.base.errors import ConfigError, ContextFull, option
from edge_run.base.options import is_list, is_whole_number, whole_numbers
from edge_run.base.protocols import Text
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.inspection.embedding_shape import can_be_cut
from edge_run.runtime.llama.model import LlamaModel
from edge_run.runtime.llama.prompt_text import CLEARLY, PIECE_CHARACTERS, USUAL_CHARACTERS, refuse_what_is_too_long


@dataclass(frozen=True, slots=True)
class TextTokens:
    """Texts as they are computed. tokens: of each. truncated: the numbers of those that were cut, from 0."""

    tokens: list[list[int]]
    truncated: tuple[int, ...]


def most_tokens(engine: Engine) -> int:
    """Return the longest text that has a vector: where it cannot be cut into passes, one pass."""
    context_tokens = engine.decoder.capabilities.context_tokens
    if can_be_cut(engine.gguf, engine.shape.pooling):
        return context_tokens
    return min(context_tokens, engine.config.context_tokens or context_tokens)


def text_tokens(engine: Engine, texts: Text | Iterable[Text], *, truncate: bool = False) -> TextTokens:
    """Return the tokens of texts; arguments and errors as for `each_text`. Computes nothing."""
    found = list(each_text(engine, texts, truncate=truncate))
    cut = tuple(number for number, (_, is_cut) in enumerate(found) if is_cut)
    return TextTokens([tokens for tokens, _ in found], cut)


def each_text(
    engine: Engine, texts: Text | Iterable[Text], *, truncate: bool = False
) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of each text, given as text or as tokens, and whether it was cut; see `Model.embed`.

    Each is asked for when the one before was taken. Raises ConfigError for what is no text, and ContextFull for one
    that is too long and is not to be truncated.
    """
    most, number = most_tokens(engine), 0
    for number, text in enumerate(_several(texts), 1):
        tokens = _tokens(engine, f"text {number}", text, most, truncate=truncate)
        is_cut = len(tokens) > most
        yield _cut(engine, tokens, most) if is_cut else tokens, is_cut
    if not number:
        raise ConfigError("texts: there are none; give at least one")


def _several(texts: Text | Iterable[Text]) -> Iterable[Text]:
    """Return texts, of which one was given, or several. Raises ConfigError for what is neither."""
    is_list_of = is_list(texts)
    if isinstance(texts, str) or (is_list_of and len(texts) and is_whole_number(texts[0])):  # type: ignore[arg-type, index]
        return cast("Iterable[Text]", [texts])
    is_bare = isinstance(texts, bytes | bytearray | memoryview | Mapping) or getattr(texts, "ndim", 1) == 0
    if not is_list_of and (is_bare or not isinstance(texts, Iterable)):
        raise ConfigError(f"texts {texts!r:.60}: must be text or tokens, or a list of those")
    return cast("Iterable[Text]", texts)


def _tokens(engine: Engine, what: str, text: Text, most: int, *, truncate: bool) -> list[int]:
    """Return the tokens of a text, called `what` in errors: more than `most` only where it may be cut."""
    model = engine.model
    if isinstance(text, str):
        if truncate:
            tokens = _first_tokens(model, text, most)
        else:
            refuse_what_is_too_long(model, text, most, CLEARLY)
            tokens = model.tokenize(text, add_special=True, parse_special=False)
    else:
        if not is_list(text):
            raise ConfigError(f"{what}: {text!r:.60} is neither text nor tokens")
        tokens = whole_numbers(what, text)
        if outside := [token for token in tokens if not 0 <= token < model.vocabulary]:
            raise ConfigError(f"{what}: token {outside[0]} is outside the vocabulary of {model.vocabulary}")
    if not tokens:
        raise ConfigError(f"{what}: is empty; give at least one token")
    if len(tokens) > most and not truncate:
        is_short = engine.plan.context_tokens < engine.plan.wanted_context_tokens
        more = f"{option('memory')}, which has no room for longer ones" if is_short else option("context_tokens")
        raise ContextFull(
            f"{what}: has {len(tokens):,} tokens, and the longest that has a vector here has {most:,}; shorten it, "
            f"have it cut ({option('truncate', True)}), or raise {more}",
            prompt_tokens=len(tokens),
            context_tokens=most,
        )
    return tokens


def _first_tokens(model: LlamaModel, text: str, most: int) -> list[int]:
    """Return the tokens of a text, of one that is far too long those of a beginning that is clearly too long."""
    n_characters = max(PIECE_CHARACTERS, CLEARLY * USUAL_CHARACTERS * most)
    while True:
        tokens = model.tokenize(text[:n_characters], add_special=True, parse_special=False)
        if len(tokens) > CLEARLY * most or n_characters >= len(text):
            return tokens
        n_characters *= 2


def _cut(engine: Engine, tokens: list[int], most: int) -> list[int]:
    """Return the first tokens of a text, and the end that the vocabulary adds to every text."""
    added = engine.model.tokenize("", add_special=True, parse_special=False)
    is_added = len(added) > engine.model.adds_bos and tokens[-1] == added[-1]
    return [*tokens[: most - 1], tokens[-1]] if is_added else tokens[:most]

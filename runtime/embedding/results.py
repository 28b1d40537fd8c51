"""What comes of embedding texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edge_run.base.errors import ConfigError
from edge_run.base.results import Backend, MemoryUse, Numerics, Plan

Vector: TypeAlias = npt.NDArray[np.float32]
Vectors: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EmbeddingShape:
    """What the vectors of a model are like.

    pooling: how one is made of a text. width: its numbers. longest_text_tokens: the longest text that has one.
    """

    pooling: str
    width: int
    longest_text_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class TextVectors:
    """What comes of one text.

    number: of the text, from 0. vectors: `(rows, width)`, float32: one, or with pooling `none` one for each token.
    tokens: those that were computed. is_truncated: whether the text was cut.
    """

    number: int
    vectors: Vectors
    tokens: int
    is_truncated: bool


@dataclass(frozen=True, slots=True, eq=False)
class Embeddings:
    """The vectors of texts, and what they cost; `repr` leaves out figures that are objects of their own.

    vectors: `(rows, width)`, float32: a row for each text; with pooling `none` one for each token, text after text; no
        row where `on_text` was given them.
    tokens: of each text, those that were computed.
    truncated: the numbers of the texts that were cut, from 0.
    pooling: how one vector was made of a text; `rank` gives a reranker's scores.
    is_normalized: whether the vectors have length 1.
    passes: how often the model was computed. wall_s, bytes_read: what all took.
    """

    vectors: Vectors
    tokens: tuple[int, ...]
    truncated: tuple[int, ...]
    pooling: str
    is_normalized: bool
    passes: int
    wall_s: float
    bytes_read: int
    memory: MemoryUse = field(repr=False)
    numerics: Numerics = field(repr=False)
    plan: Plan = field(repr=False)
    backend: Backend = field(repr=False)

    def of(self, number: int) -> Vectors:
        """Return the vectors of text `number`, `(rows, width)`: one, or with pooling `none` one for each token.

        Numbers are from 0. Raises ConfigError where there is no such text, or `on_text` was given them.
        """
        if not len(self.vectors):
            raise ConfigError("vectors: were given to on_text, and are not kept besides; take them there")
        if not 0 <= number < len(self.tokens):
            raise ConfigError(f"text {number}: there are {len(self.tokens)}, numbered from 0")
        if self.pooling != "none":
            return self.vectors[number : number + 1]
        start = sum(self.tokens[:number])
        return self.vectors[start : start + self.tokens[number]]

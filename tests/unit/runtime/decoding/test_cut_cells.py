"""When a decoder counts the cells that cuts have left: once for all of them, before anything takes cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest import mock

import pytest

from edge_run.base.protocols import BatchToken
from edge_run.runtime.decoding import decoder as decoders
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.tiers.kv.cells import CellCount

N_TEXTS, LENGTH = 3, 10


class Noting(CellCount):
    """Keeps what it is told of the lengths of sequences."""

    def __init__(self) -> None:
        super().__init__(100)
        self.noted = list[list[int]]()

    def note(self, lengths: Sequence[int]) -> None:
        self.noted.append(list(lengths))
        super().note(lengths)


class Memory:
    """How long llama.cpp's sequences are, in place of its library: texts, and as many branches."""

    def __init__(self) -> None:
        self.lengths = [LENGTH] * (2 * N_TEXTS)

    def llama_memory_seq_pos_max(self, memory: object, sequence: int) -> int:
        return self.lengths[sequence] - 1

    def llama_memory_seq_rm(self, memory: object, sequence: int, start: int, stop: int) -> bool:
        self.lengths[sequence] = min(self.lengths[sequence], max(0, start))
        return True

    def llama_memory_seq_cp(self, memory: object, source: int, target: int, start: int, stop: int) -> None:
        self.lengths[target] = self.lengths[source]


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> LocalDecoder:
    made = LocalDecoder.__new__(LocalDecoder)
    for part in ("_context", "_rollback", "_batch", "watcher"):
        setattr(made, part, mock.MagicMock())
    made._model, made.limits = mock.MagicMock(sliding_window_tokens=0), mock.MagicMock(sequences=2 * N_TEXTS)
    made.count, made._is_cut = Noting(), False
    monkeypatch.setattr(decoders, "L", Memory())
    return made


COMES: list[Callable[[LocalDecoder], object]] = [
    lambda decoder: decoder.branch(0, [N_TEXTS]),
    lambda decoder: decoder._fill([BatchToken(1, LENGTH - 1)]),
    lambda decoder: decoder._note_forks([BatchToken(1, LENGTH - 1)]),
    lambda decoder: decoder.recount([0], 0),
]


@pytest.mark.parametrize("come", COMES)
def test_cells_that_guesses_leave_are_counted_once_before_others_are_taken(
    decoder: LocalDecoder, come: Callable[[LocalDecoder], object]
) -> None:
    """They were counted twice for each text, over all sequences."""
    assert isinstance(decoder.count, Noting)
    for text in range(N_TEXTS):
        decoder.keep(text, LENGTH - 2, N_TEXTS + text, [N_TEXTS + text])
        assert decoder.rewind(text, LENGTH - 1) == LENGTH - 1
    assert decoder.count.noted == []
    come(decoder)
    come(decoder)
    assert decoder.count.noted == [[LENGTH - 1] * N_TEXTS + [0] * N_TEXTS]

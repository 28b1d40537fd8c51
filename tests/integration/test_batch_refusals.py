"""What the system refuses one answer of many, as memory or a descriptor: that one ends, and the others go on."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from edge_run import Model, Request, SamplingConfig
from edge_run.base.protocols import Logits
from edge_run.base.results import Piece
from edge_run.devices.host.memory import ProcessMemory
from edge_run.runtime.engine import engine as engine_module
from edge_run.runtime.generation.continuation import Continuation
from edge_run.runtime.generation.request import Turn


@pytest.mark.parametrize("failing", ["figures", "choice"])
def test_what_the_system_refuses_one_answer_ends_that_one(
    kit: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The figures of an answer are read from the system; a choice takes memory."""
    real_memory, real_choose, refused = engine_module.process_memory, Continuation.choose, list[int]()

    def memory() -> ProcessMemory:
        if not refused:
            refused.append(1)
            raise OSError(errno.EMFILE, "Too many open files")
        return real_memory()

    def choose(self: Continuation, logits: Logits) -> Piece | None:
        if not refused and self is texts[0] and self.n_left == 1:
            refused.append(1)
            raise MemoryError
        return real_choose(self, logits)

    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        alone = [
            [token for piece in model.generate(text, max_tokens=6, temperature=0) for token in piece.token_ids]
            for text in ("One day", "In a town")
        ]
        batch = model.open_batch()
        texts = [model.begin(Request(text, n, SamplingConfig(temperature=0))) for text, n in
                 (("Once", 2), ("One day", 6), ("In a town", 6))]  # fmt: skip
        numbers = [batch.submit(text, Turn()) for text in texts]
        if failing == "figures":
            monkeypatch.setattr(engine_module, "process_memory", memory)
        else:
            monkeypatch.setattr(Continuation, "choose", choose)
        events = [event for _ in range(30) for event in batch.advance()]
        assert refused
        last = [event for event in events if event.is_last]
        assert sorted(event.request for event in last) == sorted(numbers), "each has one end"
        assert [event.request for event in last if event.error] == [numbers[0]]
        for number, wanted in zip(numbers[1:], alone, strict=True):
            pieces = [event.piece for event in events if event.request == number and event.piece]
            assert [token for piece in pieces for token in piece.token_ids] == wanted

"""What the system refuses one answer of many, as memory or a descriptor, or its owner: the others go on."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import ConfigError, Generation, Model, Request, SamplingConfig
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


@pytest.mark.parametrize("repeat_penalty", [1.0, 1.1])
@pytest.mark.parametrize("passes", [0, 1, 3])
def test_an_answer_that_its_owner_has_closed_ends_alone(kit: Path, repeat_penalty: float, passes: int) -> None:
    """The others of its pass were lost, and waited for ever. Penalties are told the prompt before the first pass."""
    sampling = SamplingConfig(temperature=0, repeat_penalty=repeat_penalty)
    with Model(kit, context_tokens=512, threads=1, sequences=4) as model:
        batch = model.open_batch()
        texts = [model.begin(Request(text, 6, sampling)) for text in ("Once", "One day", "In a town")]
        numbers = [batch.submit(text, Turn()) for text in texts]
        events = [event for _ in range(passes) for event in batch.advance()]
        texts[0].close()
        events += [event for _ in range(30) if not batch.is_idle for event in batch.advance()]
        last = [event for event in events if event.is_last]
        assert sorted(event.request for event in last) == numbers, "each has one end"
        (failed,) = [event for event in last if event.error]
        assert failed.request == numbers[0]
        assert isinstance(failed.error, ConfigError)
        assert "closed" in str(failed.error)
        assert [len(text.tokens) for text in texts[1:]] == [6, 6]
        again = batch.submit(model.begin(Request("Once", 2, sampling)), Turn())
        events = [event for _ in range(30) if not batch.is_idle for event in batch.advance()]
        assert events[-1].request == again
        assert events[-1].error is None


def test_whole_numbers_of_numpys_are_taken_for_what_they_are(kit: Path) -> None:
    """A model was not opened with them, a seed was none that JSON has, and what is left of an answer overflowed."""
    options: dict[str, Any] = {"context_tokens": np.int64(512), "sequences": np.int64(2), "threads": np.int32(1)}
    given: dict[str, Any] = {"seed": np.int64(3), "top_k": np.int32(5)}
    most: Any = np.uint8(6)
    with Model(kit, **options) as model:
        alone = model.generate("Once", max_tokens=6, seed=3, top_k=5).result()
        requests = [Request("One day", most), Request("Once", most, SamplingConfig(**given))]
        found = [one for one in model.generate_many(requests).results() if isinstance(one, Generation)]
    assert [one.completion_tokens for one in found] == [6, 6]
    assert found[1].token_ids == alone.token_ids
    assert json.dumps(found[1].seed) == "3"

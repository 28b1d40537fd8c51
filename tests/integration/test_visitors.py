"""Any thread may turn texts into tokens and back, until the model is closed, which waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from at_once import OPTIONS, PROMPT
from edge_run import ConfigError, Model
from edge_run.runtime.llama import _ggml as ggml

ASKED: list[tuple[str, str, Callable[[Model], object]]] = [
    ("tokenize", "tokenize", lambda model: model.tokenize(PROMPT)),
    ("prompt_tokens", "tokenize", lambda model: model.prompt_tokens(PROMPT)),
    ("text_tokens", "tokenize", lambda model: model.text_tokens(PROMPT).tokens),
    ("count_tokens", "count_tokens", lambda model: model._engine.model.count_tokens(PROMPT)),
    ("detokenize", "token_bytes", lambda model: model.detokenize([5, 6, 7])),
    ("token_bytes", "token_bytes", lambda model: model.token_bytes(5)),
]


@pytest.mark.parametrize(("native", "ask"), [asked[1:] for asked in ASKED], ids=[asked[0] for asked in ASKED])
def test_nothing_is_freed_under_who_reads_the_vocabulary(
    kit: Path, native: str, ask: Callable[[Model], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segmentation fault ended the process."""
    model = Model(kit, **OPTIONS)
    wanted, is_inside, may_leave, found = ask(model), threading.Event(), threading.Event(), list[object]()
    real = getattr(ggml, native)

    def slow(*given: Any) -> Any:
        is_inside.set()
        assert may_leave.wait(60)
        return real(*given)

    monkeypatch.setattr(ggml, native, slow)

    def read() -> None:
        try:
            found.append(ask(model))
        except ConfigError as error:  # of several calls, one that comes later is refused
            found.append(error)

    reading, closing = (threading.Thread(target=what, daemon=True) for what in (read, model.close))
    reading.start()
    assert is_inside.wait(60)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive(), "it waits"
    may_leave.set()
    closing.join(60)
    reading.join(60)
    assert not closing.is_alive()
    assert found == [wanted] or "this model was closed" in str(found[0])
    with pytest.raises(ConfigError, match="this model was closed"):
        ask(model)

"""Ctrl-C, or whoever has the interrupt, ends an opening: also while llama.cpp reads a whole file itself."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from edge_run import Cancelled, Model
from edge_run.base.interrupt import Interrupt
from edge_run.runtime.engine import engine
from edge_run.runtime.llama import _ggml as ggml
from tiny_models import make_model

OPTIONS: dict[str, Any] = {"context_tokens": 256, "threads": 1, "check_file": False}


class Pressed(Interrupt):
    """Is set when it is asked for the third time from where llama.cpp reads tensors."""

    n_asked = 0

    def check(self) -> None:
        self.n_asked += 1
        if self.n_asked == 3:
            self.cancel()
        super().check()


@pytest.mark.parametrize("what", ["model", "draft", "ours"])
def test_an_opening_ends_between_two_tensors(what: str, folder: Path) -> None:
    path = make_model("llama", folder)
    more: dict[str, Any] = {
        "model": {"backend": "llama.cpp"},
        "draft": {"draft": path, "speculate": "draft"},
        "ours": {},
    }[what]
    interrupt = Pressed()
    with pytest.raises(Cancelled):
        Model(path, interrupt=interrupt, **OPTIONS, **more)
    assert interrupt.n_asked == 3, "nothing was read after that"
    with Model(path, **OPTIONS, **more) as model:
        assert model.generate([1, 2, 3], max_tokens=2).result().completion_tokens == 2


def test_an_opening_ends_after_its_last_tensor_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt, open_supply = Interrupt(), engine.open_supply

    def late(*arguments: Any) -> Any:
        interrupt.cancel()
        return open_supply(*arguments)

    monkeypatch.setattr(engine, "open_supply", late)
    with pytest.raises(Cancelled):
        Model(make_model("llama", folder), interrupt=interrupt, **OPTIONS)


def test_ctrl_c_in_an_opening_is_raised_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begin, seen = ggml.LoadProgress._on_progress, list[float]()

    def press(self: ggml.LoadProgress, share: float, data: Any) -> bool:
        seen.append(share)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)
        return begin(self, share, data)

    monkeypatch.setattr(ggml.LoadProgress, "_on_progress", press)
    interrupt = Interrupt()
    try:
        with pytest.raises(KeyboardInterrupt), interrupt.hearing_signals():
            Model(make_model("llama", folder), interrupt=interrupt, **OPTIONS, backend="llama.cpp")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(seen) in (2, 3)

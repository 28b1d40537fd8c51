"""An engine where our own loader cannot run, or not in its usual way: who loads the model then, and what is refused."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from edge_run import ModelConfig, NotSupported
from edge_run.base.results import Backend
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.keeping.opening import open_keeper
from edge_run.runtime.llama import _ggml as ggml
from edge_run.tiers import _libc
from in_child import in_child
from small_engines import OPTIONS, PROMPT, greedy, open_engine, plain_tokens, streaming_engine
from tiny_models import make_model


@in_child
def test_buffered_reads_where_direct_ones_are_refused(llama: Path) -> None:
    (wanted,) = plain_tokens(llama, PROMPT)
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *rest, **options)

    os.open = refuse
    with streaming_engine(llama) as engine:
        assert engine.backend.name == "edge-run"
        assert "no direct reads" in engine.backend.reason
        assert greedy(Session(engine.decoder), PROMPT) == wanted


@in_child
def test_a_model_on_a_file_system_in_memory() -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no writable /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as shm:
        path = make_model("llama", Path(shm))
        (wanted,) = plain_tokens(path, PROMPT)
        with streaming_engine(path) as engine:
            assert greedy(Session(engine.decoder), PROMPT) == wanted


def test_where_frames_cannot_be_moved_llama_cpp_runs_the_model_and_says_why(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wanted,) = plain_tokens(llama, PROMPT)

    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(_libc, "move_pages", refuse)
    with open_engine(llama) as engine:
        assert (engine.backend.name, engine.plan.mode) == ("llama.cpp", "llama.cpp")
        assert "does not move page frames" in engine.backend.reason
        assert greedy(Session(engine.decoder), PROMPT) == wanted
    with pytest.raises(NotSupported, match="does not move page frames"):
        Engine.open(llama, ModelConfig(**OPTIONS, backend="edge-run"))


def unreadable(*_: object) -> None:
    raise AssertionError("what is at an address is not known")


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> str:
    """A llama.cpp whose structs differ, so that nothing of ours may read or write them."""
    reason = "its tensor struct has another size"
    monkeypatch.setattr(ggml, "check_library", lambda: reason)
    monkeypatch.setattr(ggml, "tensor_at", unreadable)
    return reason


def test_a_library_that_is_not_the_one_we_know(llama: Path, unknown: str, tmp_path: Path) -> None:
    """A chat asks for a prompt cache, for which passes would be looked at."""
    with open_engine(llama, prompt_cache=tmp_path) as engine:
        assert engine.backend == Backend("llama.cpp", unknown)
        said = list[str]()
        assert open_keeper(engine, said.append) is None
        assert said == [f"prompt cache: off: llama.cpp's own loader runs this model ({unknown})"]
        assert len(greedy(Session(engine.decoder), PROMPT)) > 1


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"exact": True}, "exact: not with this llama.cpp: its tensor struct"),
        ({"draft": Path("none.gguf")}, "a draft model .*: not with this llama.cpp: its tensor struct"),
        ({"kv_keep": 64}, "kv keep: llama.cpp's own loader runs the model: its tensor struct.*leave out kv_keep="),
        ({"kv_spill": "on"}, "kv spill: llama.cpp's own loader runs the model"),
    ],
)
def test_what_only_our_loader_does_is_refused(options: dict[str, Any], what: str, llama: Path, unknown: str) -> None:
    with pytest.raises(NotSupported, match=what):
        Engine.open(llama, ModelConfig(**{**OPTIONS, **options}))


def test_without_a_prompt_cache_no_pass_is_looked_at(llama: Path, tmp_path: Path) -> None:
    with open_engine(llama, backend="llama.cpp", prompt_cache=tmp_path) as engine:
        assert not hasattr(engine._loaded.context, "_callback")

"""What llama.cpp says reaches who listens, and what fails meanwhile leaves no model behind."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator

import pytest

from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.model import LlamaModel
from kit_models import KIT


def test_a_line_reaches_all_though_another_thread_stops_listening() -> None:
    stops, stopped, heard = threading.Event(), threading.Event(), list[str]()

    def other() -> None:
        with ggml.log.listening(lambda line: None):
            listens.set()
            stops.wait(10)
        stopped.set()

    def first(line: str) -> None:
        stops.set()
        assert stopped.wait(10)

    listens = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    listens.wait(10)
    with ggml.log.listening(first), ggml.log.listening(heard.append):
        ggml.log._on_line(2, b"a line\n", None)
    thread.join()
    assert heard == ["a line"]


def test_while_nobody_listens_no_line_waits_for_python(caplog: pytest.LogCaptureFixture) -> None:
    callback, told = L.llama_log_callback(), ctypes.c_void_p()

    def is_deaf() -> bool:
        L.llama_log_get(ctypes.byref(callback), ctypes.byref(told))
        return ctypes.cast(callback, ctypes.c_void_p).value != ctypes.cast(ggml.log._callback, ctypes.c_void_p).value

    with ggml.log.listening(lambda line: None):
        with ggml.log.listening(lambda line: None):
            assert not is_deaf()
        assert not is_deaf(), "another one listens still"
    assert is_deaf()
    callback(1, b"a line\n", None)  # it is there to be called
    caplog.set_level(logging.DEBUG, ggml.logger.name)
    with ggml.log.listening(lambda line: None):
        pass
    assert not is_deaf(), "the lines are of use to whoever reads the log"


def test_a_model_that_was_loaded_in_vain_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = []

    @contextlib.contextmanager
    def interrupted(listener: object) -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    free = L.llama_model_free
    monkeypatch.setattr(L, "llama_model_free", lambda handle: (freed.append(handle), free(handle)))
    monkeypatch.setattr(ggml.log, "listening", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LlamaModel([KIT], mode="vocabulary")
    assert len(freed) == 1

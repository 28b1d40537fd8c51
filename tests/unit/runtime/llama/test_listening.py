"""What llama.cpp says reaches who listens, and what fails meanwhile leaves no model behind."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from edge_run.base.errors import BudgetError
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama import model as module
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.model import LlamaModel
from kit_models import KIT


def test_a_line_reaches_all_though_another_thread_stops_listening() -> None:
    stops, stopped, heard = threading.Event(), threading.Event(), list[str]()

    def other() -> None:
        with ggml.log.listening(lambda line: None):
            listens.set()
            stops.wait(60)
        stopped.set()

    def first(line: str) -> None:
        stops.set()
        assert stopped.wait(60)

    listens = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    listens.wait(60)
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


def refuse(line: str) -> None:
    """A listener that fails."""
    raise OSError(line)


def test_what_a_listener_raises_is_of_the_block_that_heard_it() -> None:
    def hear() -> None:
        with ggml.log.listening(refuse):
            ggml.log._on_line(2, b"a line\n", None)

    def hear_and_fail() -> None:
        with ggml.log.listening(refuse):
            ggml.log._on_line(2, b"a line\n", None)
            raise ValueError("of the block")

    with pytest.raises(OSError, match="a line"):
        hear()
    with pytest.raises(ValueError, match="of the block"):
        hear_and_fail()
    with ggml.log.listening(lambda line: None):
        pass  # hears nothing, and fails with nothing


def test_what_a_listener_raises_is_of_its_thread() -> None:
    heard, over = threading.Event(), threading.Event()

    def hear() -> None:
        with ggml.log.listening(refuse):
            ggml.log._on_line(2, b"a line\n", None)
            heard.set()
            assert over.wait(60)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(hear)
        try:
            assert heard.wait(60)
            with ggml.log.listening(lambda line: None):
                pass
        finally:
            over.set()
        with pytest.raises(OSError, match="a line"):
            other.result(10)


@pytest.mark.parametrize(
    "line",
    [
        b"ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900 MiB on device 0: cudaMalloc failed: out of memory",
        b"alloc_tensor_range: failed to allocate Vulkan0 buffer of size 1073741824",
        b"llama_model_load: error loading model: unable to allocate CUDA0 buffer",
        b"ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 1073741824",
    ],
)
def test_where_memory_is_short_the_file_is_not_to_blame(line: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any) -> None:
        """What llama.cpp does then: no model, and a line that says why."""
        ggml.log._on_line(4, line, None)

    monkeypatch.setattr(module, "_load", load)
    with pytest.raises(BudgetError, match="less memory is free there than was asked for; close other programs"):
        LlamaModel([KIT])

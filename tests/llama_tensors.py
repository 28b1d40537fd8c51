"""llama.cpp itself, asked what no published function says: the tensors of an architecture; and its log, kept quiet."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import llama_cpp.llama_cpp as low
import numpy as np
from gguf import GGUFValueType
from llama_cpp._ctypes_extensions import load_shared_library
from llama_cpp._ggml import libggml_base_path

from recipes.recipe import Keys

Shape = tuple[int, ...]
"""Sizes in GGUF order: the row length first."""


class _TensorHead(ctypes.Structure):
    """The start of llama.cpp's `ggml_tensor`: all that we read of it."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


def tensor_shapes(metadata: Keys) -> dict[str, Shape]:
    """Every tensor that llama.cpp creates for `metadata`, optional ones too."""
    shapes: dict[str, Shape] = {}

    @low.llama_model_set_tensor_data_t
    def note(tensor: int, _user_data: int | None) -> None:
        sizes = list(_TensorHead.from_address(tensor).ne)
        while len(sizes) > 1 and sizes[-1] == 1:
            sizes.pop()
        shapes[_ggml.ggml_get_name(tensor).decode()] = tuple(sizes)

    low.llama_backend_init()
    params = low.llama_model_default_params()
    params.n_gpu_layers = 0
    context = _gguf_context(metadata)
    try:
        with catching_log() as log:
            model = low.llama_model_init_from_user(context, note, None, params)
    finally:
        _ggml.gguf_free(context)
    if not model:
        raise RuntimeError(f"llama.cpp refused the metadata of {metadata['general.architecture']}: {log}")
    low.llama_model_free(model)
    return shapes


def _gguf_context(metadata: Keys) -> int:
    """A `gguf_context` in llama.cpp's memory that holds `metadata`; the caller frees it."""
    context: int = _ggml.gguf_init_empty()
    for name, value in metadata.items():
        key = name.encode()
        if isinstance(value, bool):
            _ggml.gguf_set_val_bool(context, key, value)
        elif isinstance(value, int):
            _ggml.gguf_set_val_u32(context, key, value)
        elif isinstance(value, float):
            _ggml.gguf_set_val_f32(context, key, value)
        elif isinstance(value, str):
            _ggml.gguf_set_val_str(context, key, value.encode())
        elif isinstance(value[0], str):
            words = (ctypes.c_char_p * len(value))(*(str(word).encode() for word in value))
            _ggml.gguf_set_arr_str(context, key, words, len(value))
        else:
            numbers = np.asarray(value, dtype=np.float32 if isinstance(value[0], float) else np.uint32)
            _ggml.gguf_set_arr_data(context, key, int(value_type(value[0])), numbers.ctypes.data, len(value))
    return context


def _load_ggml() -> ctypes.CDLL:
    library: ctypes.CDLL = load_shared_library("ggml-base", libggml_base_path)
    context, text = ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("ggml_get_name", text, [ctypes.c_void_p]),
        ("gguf_init_empty", context, []),
        ("gguf_free", None, [context]),
        ("gguf_set_val_bool", None, [context, text, ctypes.c_bool]),
        ("gguf_set_val_u32", None, [context, text, ctypes.c_uint32]),
        ("gguf_set_val_f32", None, [context, text, ctypes.c_float]),
        ("gguf_set_val_str", None, [context, text, text]),
        ("gguf_set_arr_str", None, [context, text, ctypes.c_void_p, ctypes.c_size_t]),
        ("gguf_set_arr_data", None, [context, text, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


_ggml = _load_ggml()


def value_type(value: bool | int | float | str) -> GGUFValueType:
    if isinstance(value, bool):  # before int, of which it is a kind
        return GGUFValueType.BOOL
    if isinstance(value, int):
        return GGUFValueType.UINT32
    return GGUFValueType.FLOAT32 if isinstance(value, float) else GGUFValueType.STRING


_GGML_LOG_LEVEL_WARN, _GGML_LOG_LEVEL_ERROR = 3, 4


@low.llama_log_callback
def _forget(_level: int, _text: bytes, _user_data: int | None) -> None:
    """Drop a line; at module level, as llama.cpp keeps the address and nothing else would keep the object."""


@contextmanager
def catching_log() -> Iterator[list[str]]:
    """Collect llama.cpp's warnings and errors, off stderr, and give the log back to whom it belonged."""
    lines: list[str] = []

    @low.llama_log_callback
    def collect(level: int, text: bytes, _user_data: int | None) -> None:
        if level in (_GGML_LOG_LEVEL_WARN, _GGML_LOG_LEVEL_ERROR):
            lines.append(text.decode(errors="replace").strip())

    owner, owner_data = low.llama_log_callback(), ctypes.c_void_p()
    low.llama_log_get(ctypes.byref(owner), ctypes.byref(owner_data))
    low.llama_log_set(collect, None)
    try:
        yield lines
    finally:
        low.llama_log_set(owner, owner_data)


def silence_llama_logs() -> None:
    """Keep llama.cpp's log off stderr from here on: for tests that call it themselves."""
    low.llama_log_set(_forget, None)

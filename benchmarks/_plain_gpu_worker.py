"""llama-cpp-python alone, without anything of ours, with a part of a model on the GPU: whether it gets to the end.

    python _plain_gpu_worker.py MODEL.gguf LAYERS [PATTERN ...]

LAYERS: on the GPU, as llama.cpp counts them; PATTERNs: regular expressions, names of tensors that stay in memory. A
prompt of 50 tokens in passes of 32, then 6 tokens. Prints `ran`; a process that ends otherwise has not.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp.llama_cpp as low

PROMPT, DECODE, MICRO_BATCH, CONTEXT = 50, 6, 32, 256


class Override(ctypes.Structure):
    """llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def overrides(patterns: list[str]) -> ctypes.Array[Override]:
    """Return overrides that keep tensors of these names in memory."""
    library = ctypes.CDLL(str(Path(low.__file__).parent / "lib" / "libggml-base.so"))
    host = library.ggml_backend_cpu_buffer_type
    host.restype = ctypes.c_void_p
    entries = [Override(pattern.encode(), host()) for pattern in patterns]
    return (Override * (len(entries) + 1))(*entries, Override(None, None))


def main() -> None:
    """Run, and print."""
    low.llama_backend_init()
    params = low.llama_model_default_params()
    params.n_gpu_layers = int(sys.argv[2])
    kept = overrides(sys.argv[3:])
    params.tensor_buft_overrides = ctypes.cast(kept, ctypes.c_void_p)
    model = low.llama_model_load_from_file(sys.argv[1].encode(), params)
    shape = low.llama_context_default_params()
    shape.n_ctx, shape.n_batch, shape.n_ubatch, shape.n_threads = CONTEXT, MICRO_BATCH, MICRO_BATCH, 1
    context = low.llama_init_from_model(model, shape)
    if not context:
        raise SystemExit("llama.cpp cannot make a context")
    passes = [MICRO_BATCH, PROMPT - MICRO_BATCH, *[1] * DECODE]
    for width in passes:
        tokens = (ctypes.c_int32 * width)(*range(5, 5 + width))
        if low.llama_decode(context, low.llama_batch_get_one(tokens, width)):
            raise SystemExit("llama.cpp failed to decode")
    print("ran")


if __name__ == "__main__":
    main()

"""llama-cpp-python alone, without anything of ours: a prompt and tokens, all of the model on the GPU.

    python _plain_worker.py MODEL.gguf PROMPT DECODE

Prints a line of JSON: the seconds of the prompt when it is fed a second time, the median ones of a token, and the last
token.
"""

from __future__ import annotations

import ctypes
import json
import statistics
import sys
import time

import llama_cpp.llama_cpp as low
import numpy as np

CONTEXT, MICRO_BATCH, THREADS, WARM = 512, 32, 2, 2


def main() -> None:
    """Run, and print."""
    path, prompt, decode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    low.llama_backend_init()
    params = low.llama_model_default_params()
    params.n_gpu_layers = 999
    model = low.llama_model_load_from_file(path.encode(), params)
    shape = low.llama_context_default_params()
    shape.n_ctx, shape.n_batch, shape.n_ubatch = CONTEXT, MICRO_BATCH, MICRO_BATCH
    shape.n_threads = shape.n_threads_batch = THREADS
    context = low.llama_init_from_model(model, shape)
    width = low.llama_vocab_n_tokens(low.llama_model_get_vocab(model))

    def run(tokens: list[int]) -> int:
        for start in range(0, len(tokens), MICRO_BATCH):
            part = tokens[start : start + MICRO_BATCH]
            array = (ctypes.c_int32 * len(part))(*part)
            if low.llama_decode(context, low.llama_batch_get_one(array, len(part))):
                raise SystemExit("llama.cpp failed to decode")
        logits = low.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (width,)).argmax())

    def timed(tokens: list[int]) -> tuple[float, int]:
        started = time.monotonic()
        found = run(tokens)
        return time.monotonic() - started, found

    feed = [5 + i % 97 for i in range(prompt)]
    timed(feed)
    low.llama_memory_clear(low.llama_get_memory(context), False)
    prompt_s, _ = timed(feed)
    token, times = 7, []
    for _ in range(WARM + decode):
        token_s, token = timed([token])
        times.append(token_s)
    print(json.dumps({"prompt_again_s": prompt_s, "token_s": statistics.median(times[WARM:]), "last_token": token}))


if __name__ == "__main__":
    main()

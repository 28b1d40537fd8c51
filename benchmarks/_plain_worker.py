"""llama-cpp-python alone, without anything of ours: a prompt and tokens, with layers of the model on the GPU.

    python _plain_worker.py MODEL.gguf PROMPT DECODE

Prints a line of JSON: the seconds of the prompt when it is fed a second time, the median and mean ones of a token, and
the last token.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time

import llama_cpp.llama_cpp as low
import numpy as np

WARM = 2


def main() -> None:
    """Run, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("prompt", type=int)
    parser.add_argument("decode", type=int)
    parser.add_argument("--layers", type=int, default=999, help="on the GPU, as llama.cpp counts them")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    prompt, micro_batch = arguments.prompt, arguments.micro_batch
    low.llama_backend_init()
    params = low.llama_model_default_params()
    params.n_gpu_layers = arguments.layers
    model = low.llama_model_load_from_file(arguments.model.encode(), params)
    shape = low.llama_context_default_params()
    shape.n_ctx, shape.n_batch, shape.n_ubatch = arguments.context, micro_batch, micro_batch
    shape.n_threads = shape.n_threads_batch = arguments.threads
    context = low.llama_init_from_model(model, shape)
    width = low.llama_vocab_n_tokens(low.llama_model_get_vocab(model))

    def run(tokens: list[int]) -> int:
        for start in range(0, len(tokens), micro_batch):
            part = tokens[start : start + micro_batch]
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
    for _ in range(WARM + arguments.decode):
        token_s, token = timed([token])
        times.append(token_s)
    times = times[WARM:]
    figures = {"token_s": statistics.median(times), "mean_token_s": statistics.fmean(times)}
    print(json.dumps({"prompt_again_s": prompt_s, "last_token": token, **figures}))


if __name__ == "__main__":
    main()

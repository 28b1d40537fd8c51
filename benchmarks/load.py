"""Time to open a 40 GB model (a sparse file with a vocabulary of 150,000 tokens) under a 4 GiB budget.

Against llama.cpp's own `vocab_only` load of the same file, interleaved in one process. The making of the context
(llama.cpp's own `llama_init_from_model`, which zeroes the KV cache: 160 MB for 512 tokens of this model) is timed
apart: it is no part of loading a file. Nothing of the file's data may be read before the open returns: bytes read by
the process are counted from /proc/self/io. In round 0 the file is new: a child process opens it first.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from _box import MODELS, spread, write_results
from _usage import read_bytes

from edge_run.base.config import ModelConfig
from edge_run.runtime.engine import engine as engine_module
from edge_run.runtime.engine import loading
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L

VOCABULARY, LAYERS, WIDTH, FEED_FORWARD = 150_000, 80, 8192, 28672


def sparse_model(path: Path) -> Path:
    """Write the header of a 70B-like Q4_0 model; its tensors are a hole."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(64)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)
    letters = [chr(c) for c in range(33, 127)]
    words = letters + [a + b for a in letters for b in letters]
    merges = [f"{a} {b}" for a in letters for b in letters]
    for word in list(words[len(letters) :]):
        if len(words) >= VOCABULARY:
            break
        for letter in letters[:17]:
            words.append(word + letter)
            merges.append(f"{word} {letter}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words[:VOCABULARY])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(merges[:VOCABULARY])
    q4, f32 = gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.F32

    def add(name: str, rows: int, columns: int) -> None:
        writer.add_tensor_info(
            name, (rows, columns // 32 * 18), np.dtype(np.uint8), rows * columns // 32 * 18, raw_dtype=q4
        )

    def norm(name: str) -> None:
        writer.add_tensor_info(name, (WIDTH,), np.dtype(np.float32), WIDTH * 4, raw_dtype=f32)

    add("token_embd.weight", VOCABULARY, WIDTH)
    for i in range(LAYERS):
        norm(f"blk.{i}.attn_norm.weight")
        add(f"blk.{i}.attn_q.weight", WIDTH, WIDTH)
        add(f"blk.{i}.attn_k.weight", 1024, WIDTH)
        add(f"blk.{i}.attn_v.weight", 1024, WIDTH)
        add(f"blk.{i}.attn_output.weight", WIDTH, WIDTH)
        norm(f"blk.{i}.ffn_norm.weight")
        add(f"blk.{i}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        add(f"blk.{i}.ffn_up.weight", FEED_FORWARD, WIDTH)
        add(f"blk.{i}.ffn_down.weight", WIDTH, FEED_FORWARD)
    norm("output_norm.weight")
    add("output.weight", VOCABULARY, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    data_bytes = sum(-(-info.nbytes // 32) * 32 for shard in writer.tensors for info in shard.values())
    writer.close()
    with path.open("r+b") as file:
        file.seek(0, 2)
        file.truncate(-(-file.tell() // 32) * 32 + data_bytes)
    return path


@contextlib.contextmanager
def sparse_file() -> Iterator[Path]:
    """Have that model in a file for a block."""
    MODELS.mkdir(parents=True, exist_ok=True)
    path = MODELS / "sparse-40g.gguf"
    try:
        yield sparse_model(path)
    finally:
        path.unlink(missing_ok=True)


def vocab_only_s(path: Path) -> float:
    """Return the seconds of llama.cpp's own vocabulary-only load."""
    params = L.llama_model_default_params()
    params.vocab_only = True
    with ggml.log.listening(lambda _: None):
        started = time.monotonic()
        model = L.llama_model_load_from_file(str(path).encode(), params)
        elapsed = time.monotonic() - started
    L.llama_model_free(model)
    return elapsed


class TimedContext(loading.LlamaContext):
    """A context that notes how long llama.cpp took to make it."""

    seconds = 0.0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        started = time.monotonic()
        super().__init__(*arguments, **options)
        TimedContext.seconds = time.monotonic() - started


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    loading.LlamaContext = TimedContext
    L.llama_backend_init()
    rows = []
    with sparse_file() as path:
        vocab_only_s(path)
        for number in range(arguments.rounds):
            vocab_s, before = vocab_only_s(path), read_bytes()
            started = time.monotonic()
            engine = engine_module.Engine.open(path, ModelConfig(memory="4GiB", context_tokens=512))
            open_s = time.monotonic() - started
            opened_bytes = read_bytes() - before
            engine.close()
            rows.append(
                {
                    "round": number,
                    "file_bytes": path.stat().st_size,
                    "vocab_only_s": vocab_s,
                    "open_s": open_s,
                    "context_s": TimedContext.seconds,
                    "beyond_s": open_s - vocab_s - TimedContext.seconds,
                    "read_before_open_returned_bytes": opened_bytes,
                }
            )
            print(rows[-1], flush=True)
    beyond_ms, new = [1e3 * row["beyond_s"] for row in rows[1:]], rows[0]["beyond_s"]
    context = statistics.median(row["context_s"] for row in rows)
    vocab = statistics.median(row["vocab_only_s"] for row in rows)
    finding = (
        f"{__doc__}\n* Median: {spread(beyond_ms, 0)} ms beyond vocab_only ({1e3 * vocab:.0f} ms); "
        f"the context besides: {1e3 * context:.0f} ms. A file that is new: {1e3 * new:.0f} ms beyond."
    )
    write_results("load", rows, finding)


if __name__ == "__main__":
    main()

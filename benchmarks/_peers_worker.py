"""One run of a peer in a process of its own, for `peers.py`: AirLLM or accelerate. Prints JSON.

It runs in an environment of the peers' own, so it imports nothing of edge-run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _usage import read_bytes


class Watch:
    """A streamer of transformers that notes when each token came, and how much had been read by then."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.marks: list[tuple[float, int]] = []

    def put(self, value: Any) -> None:
        """Note what comes: first the prompt, then each token."""
        self.marks.append((time.monotonic(), read_bytes()))
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        """Nothing is left to do."""


def prepare(source: Path, folder: Path) -> None:
    """Write the tokenizer of the GGUF `source` beside its weights in `folder`, which AirLLM wants."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def airllm_model(folder: Path) -> Any:
    """Return the model with AirLLM, which splits the file into layers the first time."""
    from airllm import AutoModel

    return AutoModel.from_pretrained(str(folder), device="cpu", layer_shards_saving_path=str(folder / "airllm"))


def accelerate_model(folder: Path, memory: str) -> Any:
    """Return the model with accelerate: layers in memory as far as `memory` goes, the others left in the file."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.bfloat16,
        device_map="auto",
        max_memory={"cpu": memory},
        offload_folder=str(folder / "offloaded"),
    )


def main() -> None:
    """Run and print one JSON object."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # what is asked for is here
    sys.path.remove(str(Path(__file__).resolve().parent))  # its kernels.py is not the one that transformers looks for
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=("prepare", "airllm", "accelerate"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--prompt", type=int, nargs="+", default=[1])
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--held", default="900MiB", help="by accelerate")
    arguments = parser.parse_args()
    if arguments.peer == "prepare":
        prepare(arguments.source, arguments.folder)
        print(json.dumps({}))
        return
    import torch

    torch.set_num_threads(2)
    started = time.monotonic()
    is_airllm = arguments.peer == "airllm"
    model = airllm_model(arguments.folder) if is_airllm else accelerate_model(arguments.folder, arguments.held)
    load_s, watch = time.monotonic() - started, Watch()
    with torch.inference_mode():
        model.generate(
            torch.tensor([arguments.prompt]),
            max_new_tokens=arguments.tokens,
            min_new_tokens=arguments.tokens,
            do_sample=False,
            streamer=watch,
        )
    (first_s, first_bytes), (last_s, last_bytes) = watch.marks[1], watch.marks[-1]
    n_later = arguments.tokens - 1
    print(
        json.dumps(
            {
                "load_s": load_s,
                "first_token_s": first_s - watch.marks[0][0],
                "token_s": (last_s - first_s) / n_later,
                "bytes_per_token": (last_bytes - first_bytes) / n_later,
                "tokens": watch.tokens[len(arguments.prompt) :],
            }
        )
    )


if __name__ == "__main__":
    main()

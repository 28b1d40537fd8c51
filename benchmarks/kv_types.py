"""What fewer bits for keys and values cost in quality, and what they take: perplexity of real models for each type.

    kv_types.py --text FILE [--tokens 2048] [--window 1024] [--types f16,q8_0,...] MODEL.gguf...

The text is cut into windows; of each, the tokens after the first quarter count, so that each looks back at many keys.
All types of a model see the same tokens. Flash attention is on for all, as quantised values need it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import table, write_results

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.base.protocols import BatchToken
from edge_run.runtime.engine.engine import Engine

BASE = "f16"
TYPES = (BASE, "q8_0", "q8_0/q4_0", "q5_1", "q4_0")
WIDTH, OUTPUTS, UNSCORED_SHARE = 256, 64, 4
FIELDS = ("model", "kv_type", "tokens", "perplexity", "against_f16", "bytes_per_token")


def log_losses(engine: Engine, tokens: Sequence[int], unscored: int) -> list[float]:
    """Return -log p of each token of a window after the first `unscored`, given those before it."""
    found: list[float] = []
    engine.decoder.clear()
    for start in range(0, len(tokens) - 1, OUTPUTS):
        part = tokens[start : min(start + OUTPUTS, len(tokens) - 1)]
        batch = [BatchToken(t, start + i, 0, start + i + 1 >= unscored) for i, t in enumerate(part)]
        rows = engine.decoder.decode(batch)
        positions = [token.position for token in batch if token.wants_logits]
        for position, row in zip(positions, rows, strict=True):
            top = float(row.max())
            total = math.log(float(np.exp(row - top, dtype=np.float64).sum())) + top
            found.append(total - float(row[tokens[position + 1]]))
    return found


def measure(path: Path, kv_type: str, text: str, window: int, n_tokens: int, threads: int) -> dict[str, Any]:
    """Return the perplexity of a model with keys and values of a type."""
    config = ModelConfig(
        kv_type=kv_type,
        context_tokens=window,
        micro_batch_tokens=WIDTH,
        outputs_per_pass=OUTPUTS,
        flash_attention="on",
        repack="on",
        threads=threads,
    )
    engine = Engine.open(path, config)
    tokens = engine.model.tokenize(text[: 8 * n_tokens], add_special=False, parse_special=False)[:n_tokens]
    losses: list[float] = []
    for start in range(0, len(tokens) - window + 1, window):
        losses += log_losses(engine, tokens[start : start + window], window // UNSCORED_SHARE)
    cell_bytes = engine._loaded.context.kv_bytes / engine.context_tokens
    engine.close()
    perplexity = math.exp(sum(losses) / len(losses))
    return {
        "model": path.stem,
        "kv_type": kv_type,
        "tokens": len(losses),
        "perplexity": round(perplexity, 3),
        "bytes_per_token": round(cell_bytes),
    }


def main() -> None:
    """Measure each model with each type, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    text, rows = arguments.text.read_text(encoding="utf-8"), list[dict[str, Any]]()
    for path in arguments.models:
        base = 0.0
        for kv_type in arguments.types.split(","):
            try:
                row = measure(path, kv_type, text, arguments.window, arguments.tokens, arguments.threads)
            except ConfigError as error:
                print(f"{path.stem} {kv_type}: {error}", file=sys.stderr)
                continue
            base = row["perplexity"] if kv_type == BASE else base
            row["against_f16"] = round(row["perplexity"] / base, 4) if base else "-"
            rows.append(row)
            print(*(f"{field}={row[field]}" for field in FIELDS), flush=True)
    write_results("kv-types", rows, f"Text: {arguments.text.name}.\n\n{table(FIELDS, rows)}")


if __name__ == "__main__":
    main()

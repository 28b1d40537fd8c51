"""What `--kv-keep` costs and gives: perplexity, a needle in a haystack, and the processor's time of a token.

    kv_keep.py --text FILE [--prompt 1536] [--tokens 192] [--needles 8] [--keep 128,256,512] MODEL.gguf...

A text is read as a prompt, with all of its rows; what follows is given token by token, as an answer is made, so that
each looks at what its setting lets it look at. *Perplexity* is of that continuation. *Needle*: one sentence with a
number is hidden somewhere in the text, and the beginning of that sentence follows after the text; found is a number of
which each digit is the most likely next token. All settings see the same cells, one after another. Memory is the same
for all: rows that are not looked at stay.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import table, write_results

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.streaming.chosen_rows import ChosenRows

WIDTH, EVERYTHING = 256, 1 << 30
NEEDLE, NUMBERS = " The secret number of the old lighthouse is {}.", (7481, 2960, 5137, 8026, 3694, 1852, 9473, 6215)
FIELDS = ("model", "setting", "perplexity", "against_all", "needles", "cpu_ms_per_token", "share")


class Run:
    """One model. `read` makes a text the context, `score` goes on from it, and leaves the context as it was."""

    def __init__(self, path: Path, context_tokens: int) -> None:
        config = ModelConfig(
            context_tokens=context_tokens, micro_batch_tokens=WIDTH, threads=1, kv_keep=64, flash_attention="on"
        )
        self.engine = Engine.open(path, config)
        self.feature = next(f for f in self.engine._loaded.driver.features if isinstance(f, ChosenRows))
        self._length = 0

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self.engine.model.tokenize(text, add_special=False, parse_special=False)

    def read(self, tokens: Sequence[int]) -> None:
        """Read a prompt."""
        self.engine.decoder.clear()
        for start in range(0, len(tokens), WIDTH):
            part = tokens[start : start + WIDTH]
            self.engine.decoder.decode([BatchToken(t, start + i, 0, i + 1 == len(part)) for i, t in enumerate(part)])
        self._length = len(tokens)

    def score(self, tokens: Sequence[int], kind: str, keep: int) -> tuple[list[float], list[bool], float, float]:
        """Return -log p of each token after the first, whether it is the likeliest, the CPU's seconds, the share."""
        self.feature._kind, self.feature._keep_rows = kind, keep
        self.feature._looked_at = self.feature._there = 0
        losses, best, used = list[float](), list[bool](), time.process_time()
        for i, token in enumerate(tokens[:-1]):
            row = self.engine.decoder.decode([BatchToken(token, self._length + i, 0, wants_logits=True)])[0]
            top = float(row.max())
            losses.append(top + math.log(float(np.exp(row - top, dtype=np.float64).sum())) - float(row[tokens[i + 1]]))
            best.append(int(row.argmax()) == tokens[i + 1])
        used = time.process_time() - used
        self.engine.decoder.rewind(0, self._length)
        return losses, best, used, self.feature.figures.share


def measure(
    path: Path, text: str, keeps: Sequence[int], n_prompt: int, n_tokens: int, n_needles: int
) -> list[dict[str, Any]]:
    """Return a row for each setting."""
    settings = [("pages", EVERYTHING), *((kind, keep) for keep in keeps for kind in ("pages", "window"))]
    run = Run(path, n_prompt + n_tokens + 64)
    tokens = run.tokens(text[: 8 * (n_prompt + n_tokens)])
    run.read(tokens[:n_prompt])
    continued = [run.score(tokens[n_prompt : n_prompt + n_tokens + 1], *setting) for setting in settings]
    found = [0] * len(settings)
    for number, secret in enumerate(NUMBERS[:n_needles]):
        at = n_prompt * (2 * number + 1) // (2 * n_needles)
        needle = run.tokens(NEEDLE.format(secret))
        run.read([*tokens[:at], *needle, *tokens[at : n_prompt - len(needle)]])
        asked = run.tokens("\n" + NEEDLE.format(secret).removesuffix(f"{secret}.").rstrip())
        answer = run.tokens(NEEDLE.format(secret).removesuffix("."))[len(run.tokens(NEEDLE.format("").rstrip(" ."))) :]
        for i, setting in enumerate(settings):
            _, best, _, _ = run.score([*asked, *answer], *setting)
            found[i] += all(best[len(asked) - 1 :])
    rows: list[dict[str, Any]] = []
    for (kind, keep), (losses, _, used, share), n_found in zip(settings, continued, found, strict=True):
        perplexity = math.exp(sum(losses) / len(losses))
        rows.append(
            {
                "model": path.stem,
                "setting": "all" if keep == EVERYTHING else f"{kind} {keep}",
                "perplexity": round(perplexity, 2),
                "against_all": round(perplexity / (rows[0]["perplexity"] if rows else perplexity), 3),
                "needles": f"{n_found}/{n_needles}",
                "cpu_ms_per_token": round(1000 * used / len(losses), 1),
                "share": round(share, 3),
            }
        )
    run.engine.close()
    return rows


def main() -> None:
    """Measure each model, and print a line for each setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--prompt", type=int, default=1536)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--needles", type=int, default=len(NUMBERS))
    parser.add_argument("--keep", default="128,256,512")
    arguments = parser.parse_args()
    text, rows = arguments.text.read_text(encoding="utf-8"), list[dict[str, Any]]()
    keeps = [int(keep) for keep in arguments.keep.split(",")]
    for path in arguments.models:
        found = measure(path, text, keeps, arguments.prompt, arguments.tokens, arguments.needles)
        for row in found:
            print(*(f"{field}={row[field]}" for field in FIELDS), flush=True)
        rows += found
    write_results("kv-keep", rows, f"Text: {arguments.text.name}.\n\n{table(FIELDS, rows)}")


if __name__ == "__main__":
    main()

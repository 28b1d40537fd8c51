"""Greedy tokens with speculation against those without it; of tokens that are drawn, see speculation_draws.py.

The kit models, resident, drafter kit-draft and look-up, each prompt continued by `--tokens` tokens. Every width
from 1 to 16 is used, whether it pays or not. With --exact all tokens must be the same. Without it, after a difference
the text of plain decoding is taken up again, so that all its tokens are compared; `gap` is how far apart the two best
logits were there. The noise between widths is measured on the same texts: the largest difference of a logit between
passes of 1 and of 8 tokens.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import KIT, SHARED, need, write_results
from _speculation_worker import prompts

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.speculation.drafting import Pace
from edge_run.runtime.speculation.width_control import ONE_TEXT, Offer, WidthControl

MODELS = {"kit-dense-q4_0": KIT} | {name: SHARED / "models" / f"{name}.gguf" for name in ("kit-dense", "kit-moe")}
DRAFT = SHARED / "models" / "kit-draft.gguf"
TEXTS = ("novels", "gsm8k", "repeating")


class AnyWidth(WidthControl):
    """Takes every width, whether it pays or not."""

    pace = Pace()  # what a guess takes does not count

    def __init__(self, costs: WidthCosts, most_tokens: int, least_gain: float) -> None:
        super().__init__(costs, most_tokens, least_gain)
        self._chance = random.Random(0)

    def wants_guesses(self, hoped: Sequence[Offer] = ONE_TEXT) -> bool:
        """Return True."""
        return True

    def best(self, offers: Sequence[Offer]) -> int:
        """Return one at random."""
        return self._chance.randrange(len(offers))


def engine_of(model: Path, **options: Any) -> Engine:
    """Return the engine of `model`, as all runs here open it."""
    return Engine.open(
        model, ModelConfig(**{"context_tokens": 512, "micro_batch_tokens": 64, "draft_tokens": 15, **options})
    )


def greedy(session: Session, text: list[int], start: int, n_tokens: int) -> Iterator[tuple[int, float]]:
    """Yield each next token after text[:start], and by how much it is the best."""
    logits, _ = session.feed(text[:start])
    for _ in range(n_tokens):
        second, best = np.partition(logits, -2)[-2:]
        token = int(logits.argmax())
        yield token, float(best - second)
        logits = session.step(token)


def noise_of(model: Path, text: list[int]) -> float:
    """Return the largest difference of a logit between passes of 1 and of 8 tokens."""
    rows = []
    engine = engine_of(model, outputs_per_pass=8)
    for width in (1, 8):
        engine.decoder.rewind(0, 0)
        found = [
            engine.decoder.decode([BatchToken(t, i + k, 0, True) for k, t in enumerate(text[i : i + width])]).copy()
            for i in range(0, len(text), width)
        ]
        rows.append(np.concatenate(found))
    engine.close()
    return float(np.abs(rows[0] - rows[1]).max())


def compare(name: str, model: Path, mode: dict[str, Any], n_prompts: int, n_tokens: int) -> dict[str, object]:
    """Return how many tokens were compared, and how many differ."""
    plain = engine_of(model, exact=mode.get("exact", False), speculate="off")
    engine = engine_of(model, **mode)
    session, reference = speculation_setup.open_session(engine), Session(plain.decoder)
    compared, gaps, passes, noise = 0, [], 0, 0.0
    for kind in TEXTS:
        for _, prompt in zip(range(n_prompts), prompts(kind), strict=False):
            text = ggml.tokenize(plain.model.vocab, prompt, True, False)[:200]
            start = len(text)
            answer = list(greedy(reference, text, start, n_tokens))
            text += [token for token, _ in answer]
            place = 0
            while place < n_tokens:
                found = greedy(session, text, start + place, n_tokens - place)
                pairs = list(zip(found, answer[place:], strict=True))
                same = next((i for i, (a, b) in enumerate(pairs) if a[0] != b[0]), None)
                passes += session.speculation().passes
                if same is None:
                    break
                gaps.append(answer[place + same][1])
                place += same + 1
            compared += n_tokens
            if not mode.get("exact"):
                noise = max(noise, noise_of(model, text[: 40 * 8]))
    engine.close()
    plain.close()
    mode_name = "+".join(f"{key} {Path(str(value)).stem}" for key, value in mode.items())
    return {
        "what": "greedy",
        "model": name,
        "mode": mode_name,
        "tokens": compared,
        "passes": passes,
        "differing": len(gaps),
        "largest_gap": max(gaps, default=0.0),
        "noise": noise,
    }


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=6, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=100)
    arguments = parser.parse_args()
    need(*MODELS.values(), DRAFT)
    speculation_setup.WidthControl = AnyWidth  # type: ignore[misc]
    modes: list[dict[str, Any]] = [
        {"exact": is_exact} | mode
        for is_exact in (True, False)
        for mode in ({"speculate": "ngram"}, {"speculate": "draft", "draft": DRAFT}, {"draft": DRAFT})
    ]
    rows: list[dict[str, object]] = []
    for name, model in MODELS.items():
        for mode in modes:
            rows.append(compare(name, model, mode, arguments.prompts, arguments.tokens))
            print(rows[-1], flush=True)
    lines = [
        f"* {row['model']}, {row['mode']}: {row['differing']} of {row['tokens']} tokens differ, gap at most "
        f"{float(str(row['largest_gap'])):.4f}, noise {float(str(row['noise'])):.4f}."
        for row in rows
    ]
    write_results("speculation-exactness", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()

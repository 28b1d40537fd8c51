"""Greedy tokens with speculation against those without it, and the distribution of tokens that are drawn.

Greedy: the kit models, resident, drafter kit-draft and look-up, each prompt continued by `--tokens` tokens. Every width
from 1 to 16 is used, whether it pays or not. With --exact all tokens must be the same. Without it, after a difference
the text of plain decoding is taken up again, so that all its tokens are compared; `gap` is how far apart the two best
logits were there. The noise between widths is measured on the same texts: the largest difference of a logit between
passes of 1 and of 8 tokens.

Drawn: a random model of 384 tokens at temperature 1, drafter the same model in 4 bits. The fourth token after a prompt
is drawn 20,000 times with speculation and twice without, each draw with a seed of its own. The total variation between
speculation and plain decoding is held against that between the two plain runs, and that against what is to be expected
of two such samples. Since guesses are held against the token that the seed draws, there is a sharper test: with the
seeds of a plain run, speculation must draw the same tokens but for the noise between widths, and with --exact all.
"""

from __future__ import annotations

import argparse
import atexit
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from _box import KIT, ROOT, SHARED, write_results
from _speculation_worker import prompts

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.base.sampling_config import SamplingConfig
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.generation.sampling import Sampler
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.speculation.width_control import WidthControl

MODELS = {"kit-dense-q4_0": KIT} | {name: SHARED / "models" / f"{name}.gguf" for name in ("kit-dense", "kit-moe")}
DRAFT = SHARED / "models" / "kit-draft.gguf"
TEXTS = ("novels", "gsm8k", "repeating")


class AnyWidth(WidthControl):
    """Takes every width, whether it pays or not."""

    def __init__(self, costs: WidthCosts, most_tokens: int, least_gain: float) -> None:
        super().__init__(costs, most_tokens, least_gain)
        self._chance = random.Random(0)

    def wants_guesses(self) -> bool:
        """Return True."""
        return True

    def choose(self, values: Sequence[float]) -> int:
        """Return a width at random."""
        return self._chance.randint(1, min(self._most_tokens, len(values) + 1))


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


def draws(model: Path, draft: Path | None, n_draws: int, first_seed: int, is_exact: bool = False) -> np.ndarray:
    """Return the fourth token after the prompt, of each draw."""
    speculation_setup.WidthControl = AnyWidth  # type: ignore[misc]
    speculate = "draft" if draft else "off"
    engine = engine_of(model, draft=draft, speculate=speculate, context_tokens=64, threads=1, exact=is_exact)
    session = speculation_setup.open_session(engine)
    fourth = []
    for number in range(n_draws):
        config = SamplingConfig(temperature=1.0, top_k=6, top_p=1.0, min_p=0.0, seed=first_seed + number)
        with Sampler(engine.model.vocab, config, engine.model.vocabulary) as sampler:
            logits, _ = session.feed([5, 6, 7, 8])
            for step in range(4):
                token = sampler.choose(logits)
                sampler.accept(token)
                if step < 3:
                    logits = session.step(token)
            fourth.append(token)
    print("drawn", draft, session.speculation().accepted, file=sys.stderr)
    engine.close()
    return np.array(fourth)


def variation(one: np.ndarray, other: np.ndarray) -> float:
    """Return the total variation between two samples of tokens."""
    size = 1 + max(one.max(), other.max())
    return float(np.abs(np.bincount(one, minlength=size) - np.bincount(other, minlength=size)).sum() / 2 / len(one))


def compare_exact_draws(n_draws: int) -> tuple[list[dict[str, object]], list[str]]:
    """Return the row, and the line, of what is drawn with --exact under the same seeds; each way in a process."""
    model, draft = draw_models()
    with ProcessPoolExecutor(2) as pool:
        plain, guessed = (pool.submit(draws, model, way, n_draws, 0, True) for way in (None, draft))
        n_differing = int((plain.result() != guessed.result()).sum())
    row: dict[str, object] = {"what": "drawn", "mode": "exact, the same seeds", "tokens": n_draws}
    line = f"* With --exact and the same seeds {n_differing} of {n_draws:,} tokens differ."
    return [row | {"differing": n_differing}], [line]


def draw_models() -> tuple[Path, Path]:
    """Return a random model of 384 tokens, and the same in 4 bits; they go when the process ends."""
    sys.path.append(str(ROOT / "tests"))
    from tiny_models import make_model

    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return make_model("llama", folder), make_model("llama", folder, quantisation="Q4_0")


def compare_draws(n_draws: int) -> tuple[list[dict[str, object]], list[str]]:
    """Return the rows of the distribution of what is drawn, and lines that say them."""
    model, draft = draw_models()
    one, other = (draws(model, None, n_draws, seed) for seed in (0, 10**6))
    apart, alike = (draws(model, draft, n_draws, seed) for seed in (2 * 10**6, 0))
    pairs = {
        "plain against plain": (one, other),
        "speculation against plain": (apart, one),
        "speculation against the other plain": (apart, other),
        "speculation against plain, the same seeds": (alike, one),
    }
    rows: list[dict[str, object]] = [
        {"what": "drawn", "mode": what, "tokens": n_draws, "total_variation": variation(*pair)}
        for what, pair in pairs.items()
    ]
    chance = np.random.default_rng(0)
    shares = np.bincount(np.concatenate([one, other])) / (2 * n_draws)
    by_chance = [
        np.abs(chance.multinomial(n_draws, shares) - chance.multinomial(n_draws, shares)).sum() / 2 / n_draws
        for _ in range(1000)
    ]
    lines = [f"* Total variation, {row['mode']}: {row['total_variation']:.4f}." for row in rows]
    lines.append(
        f"* Of two samples of one distribution are to be expected: {np.mean(by_chance):.4f}, in 95 % of cases at most "
        f"{np.quantile(by_chance, 0.95):.4f}."
    )
    lines.append(f"* With the same seeds {int((alike != one).sum())} of {n_draws:,} tokens differ.")
    return rows, lines


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=6, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--only", choices=("greedy", "drawn", "drawn-exact"), help="one part")
    arguments = parser.parse_args()
    speculation_setup.WidthControl = AnyWidth  # type: ignore[misc]
    modes: list[dict[str, Any]] = [
        {"exact": is_exact} | mode
        for is_exact in (True, False)
        for mode in ({"speculate": "ngram"}, {"speculate": "draft", "draft": DRAFT}, {"draft": DRAFT})
    ]
    rows: list[dict[str, object]] = []
    for name, model in MODELS.items() if arguments.only in (None, "greedy") else ():
        for mode in modes:
            rows.append(compare(name, model, mode, arguments.prompts, arguments.tokens))
            print(rows[-1], flush=True)
    lines = [
        f"* {row['model']}, {row['mode']}: {row['differing']} of {row['tokens']} tokens differ, gap at most "
        f"{float(str(row['largest_gap'])):.4f}, noise {float(str(row['noise'])):.4f}."
        for row in rows
    ]
    for part, compare_them in (("drawn", compare_draws), ("drawn-exact", compare_exact_draws)):
        if arguments.only in (None, part):
            drawn, said = compare_them(arguments.draws)
            rows, lines = rows + drawn, lines + said
    write_results(
        "-".join(["speculation-exactness", *filter(None, [arguments.only])]), rows, "\n".join([__doc__ or "", *lines])
    )


if __name__ == "__main__":
    main()

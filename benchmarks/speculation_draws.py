"""Whether tokens that are drawn with speculation have the distribution that they have without it: in pieces, by tests.

    speculation_draws.py draw FOLDER --way plain|guessed|plain-exact|guessed-exact [--first 0] [--draws 20000]
    speculation_draws.py judge FOLDER

A random model of 384 tokens at temperature 1 (top-k 6), drafter the same model in 4 bits; every width from 1 to 16 is
used, whether it pays or not, as deep as tokens are drawn. The fourth token after a prompt is drawn, each time with a
seed of its own. `draw` writes a piece of one way into the folder; plain decoding gives the same logits after the same
tokens, so that each beginning is computed once. `judge` tests all that is in the folder:

* Against the exact distribution: with top-k 6 there are 216 beginnings of three tokens, so what plain decoding draws
  from is known, and no noise floor has to be sampled. The statistic is the total variation between the draws and that
  distribution; how large it is by chance is found with 10,000 samples of the distribution.
* The same seeds: a guess is held against the token that the seed draws, so both ways draw the same token but for the
  noise of kernels, whose logits depend a little on the width of a pass. The share of draws that differ is a bound on
  the total variation between the two distributions. Whether those draws lean to some tokens is tested by changing sides
  at random in each differing pair, 10,000 times.
* The same seeds with --exact, where logits do not depend on the width: all tokens must be the same.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from _box import ROOT, write_results
from speculation_exactness import AnyWidth, engine_of

from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation import speculation_setup
from edge_run.runtime.generation.sampling import Sampler
from edge_run.runtime.speculation import shared_drafters

WAYS = ("plain", "guessed", "plain-exact", "guessed-exact")
PROMPT, N_DRAWN, TOP_K = [5, 6, 7, 8], 4, 6
SAMPLES = 10_000  # of what chance gives
PIECE = re.compile(rf"({'|'.join(WAYS)})-(\d+)\.npy")


@contextmanager
def opened(way: str) -> Iterator[Engine]:
    """Have the engine of one way for a block."""
    sys.path.append(str(ROOT / "tests"))
    from tiny_models import make_model

    speculation_setup.WidthControl = AnyWidth  # type: ignore[misc]
    shared_drafters.MOST_DEPTH = N_DRAWN - 1  # nobody comes to what lies deeper
    is_guessed, is_exact = way.startswith("guessed"), way.endswith("exact")
    with tempfile.TemporaryDirectory() as name:
        model = make_model("llama", Path(name))
        draft = make_model("llama", Path(name), quantisation="Q4_0") if is_guessed else None
        speculate = "draft" if is_guessed else "off"
        engine = engine_of(model, draft=draft, speculate=speculate, context_tokens=64, threads=1, exact=is_exact)
        yield engine
        engine.close()


class PlainLogits:
    """What plain decoding has after the prompt and a few tokens; each is computed once."""

    def __init__(self, engine: Engine) -> None:
        self._session = Session(engine.decoder)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    def after(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Return the logits after `tokens`, which are computed one by one, as an answer is."""
        if tokens not in self._known:
            row, _ = self._session.feed(PROMPT)
            for token in tokens:
                row = self._session.step(token)
            self._known[tokens] = row.copy()
        return self._known[tokens]


def draw(way: str, first_seed: int, n_draws: int) -> np.ndarray:
    """Return the fourth token after the prompt, of each draw."""
    drawn = np.empty(n_draws, np.int32)
    with opened(way) as engine:
        session = speculation_setup.open_session(engine)
        plain = None if way.startswith("guessed") else PlainLogits(engine)
        for number in range(n_draws):
            config = SamplingConfig(temperature=1.0, top_k=TOP_K, top_p=1.0, min_p=0.0, seed=first_seed + number)
            with Sampler(engine.model.vocab, config, engine.model.vocabulary) as sampler:
                tokens: tuple[int, ...] = ()
                row = plain.after(()) if plain else session.feed(PROMPT)[0]
                while True:
                    tokens = (*tokens, sampler.choose(row))
                    sampler.accept(tokens[-1])
                    if len(tokens) == N_DRAWN:
                        break
                    row = plain.after(tokens) if plain else session.step(tokens[-1])
            drawn[number] = tokens[-1]
    return drawn


def exact_distribution() -> np.ndarray:
    """Return the chance of each token to be the fourth, in plain decoding."""
    with opened("plain") as engine:
        plain = PlainLogits(engine)
        chances = np.zeros(engine.model.vocabulary)
        beginnings = {(): 1.0}
        for length in range(1, N_DRAWN + 1):
            grown: dict[tuple[int, ...], float] = {}
            for tokens, chance in beginnings.items():
                row = plain.after(tokens).astype(np.float64)
                best = np.argsort(-row, kind="stable")[:TOP_K]
                rates = np.exp(row[best] - row[best[0]])
                for token, rate in zip(best.tolist(), (rates / rates.sum()).tolist(), strict=True):
                    if length == N_DRAWN:
                        chances[token] += chance * rate
                    else:
                        grown[(*tokens, token)] = chance * rate
            beginnings = grown
    return chances


def pieces(folder: Path) -> dict[str, dict[int, int]]:
    """Return by way the token of each seed, of all pieces in `folder`."""
    found: dict[str, dict[int, int]] = {way: {} for way in WAYS}
    for path in sorted(folder.iterdir()):
        if match := PIECE.fullmatch(path.name):
            first = int(match[2])
            found[match[1]].update((first + i, int(token)) for i, token in enumerate(np.load(path)))
    return found


def against_distribution(drawn: np.ndarray, chances: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the total variation between draws and a distribution, and those of samples of the distribution."""
    n_draws = len(drawn)
    sampled = np.random.default_rng(0).multinomial(n_draws, chances, size=SAMPLES)
    found = np.bincount(drawn, minlength=len(chances))
    return float(np.abs(found / n_draws - chances).sum() / 2), np.abs(sampled / n_draws - chances).sum(axis=1) / 2


def two_samples(chances: np.ndarray, n_draws: int) -> tuple[float, float, float]:
    """Return the total variation between two samples of a distribution: the mean, and in 95 % of cases at most.

    The last is that of the larger of two comparisons, of one sample with two others.
    """
    samples = np.random.default_rng(0).multinomial(n_draws, chances, size=(3, SAMPLES))
    one, other = (np.abs(samples[0] - samples[i]).sum(axis=1) / 2 / n_draws for i in (1, 2))
    return float(one.mean()), float(np.quantile(one, 0.95)), float(np.quantile(np.maximum(one, other), 0.95))


def paired(one: np.ndarray, other: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the total variation between draws of the same seeds, and those with sides changed at random."""
    differing, n_draws = one != other, len(one)
    size = 1 + int(max(one.max(), other.max()))
    ours, theirs = one[differing], other[differing]

    def variation(signs: np.ndarray) -> float:
        difference = np.bincount(ours, signs, size) - np.bincount(theirs, signs, size)
        return float(np.abs(difference).sum() / 2 / n_draws)

    chance = np.random.default_rng(0)
    changed = [variation(chance.choice((-1.0, 1.0), len(ours))) for _ in range(SAMPLES)]
    return variation(np.ones(len(ours))), np.array(changed)


def row_of(
    what: str, n_draws: int, found: float, by_chance: np.ndarray, n_differing: int | None = None
) -> dict[str, Any]:
    """Return the row of one test. p: the share of what chance gives that is as large, this one itself counted."""
    return {
        "what": what,
        "draws": n_draws,
        "total_variation": round(found, 5),
        "expected": round(float(by_chance.mean()), 5),
        "most_in_95_percent": round(float(np.quantile(by_chance, 0.95)), 5),
        "p": round(float((1 + (by_chance >= found).sum()) / (1 + SAMPLES)), 4),
        "differing": "" if n_differing is None else n_differing,
    }


def judge(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of all tests that the pieces in `folder` allow, and lines that say them."""
    drawn, chances = pieces(folder), exact_distribution()
    rows = []
    for way in WAYS[:2]:
        if drawn[way]:
            tokens = np.array(list(drawn[way].values()), np.int32)
            rows.append(row_of(f"{way}, exact distribution", len(tokens), *against_distribution(tokens, chances)))
    for what, names in (("the same seeds", WAYS[:2]), ("the same seeds, --exact", WAYS[2:])):
        plain, guessed = (drawn[name] for name in names)
        if seeds := sorted(plain.keys() & guessed.keys()):
            one, other = (np.array([way[seed] for seed in seeds]) for way in (guessed, plain))
            rows.append(row_of(what, len(seeds), *paired(one, other), int((one != other).sum())))
    lines = []
    for row in rows:
        differing = f"; {row['differing']:,} draws differ" if row["differing"] != "" else ""
        lines.append(
            f"* {row['what']}, {row['draws']:,} draws: total variation {row['total_variation']:.5f}; by chance "
            f"{row['expected']:.5f}, in 95 % of cases at most {row['most_in_95_percent']:.5f} (p = {row['p']:.4f})"
            f"{differing}."
        )
    mean, most, most_of_two = two_samples(chances, 20_000)
    lines.append(
        f"* Two samples of 20,000 draws of the exact distribution are {mean:.4f} apart in the mean, in 95 % of cases "
        f"{most:.4f} at most, and the farther of two that are held against a third {most_of_two:.4f}."
    )
    return rows, lines


def main() -> None:
    """Draw a piece, or judge all of them and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("draw", "judge"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--way", choices=WAYS, default="plain")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--draws", type=int, default=20_000)
    arguments = parser.parse_args()
    if arguments.do == "draw":
        arguments.folder.mkdir(parents=True, exist_ok=True)
        drawn = draw(arguments.way, arguments.first, arguments.draws)
        np.save(arguments.folder / f"{arguments.way}-{arguments.first}.npy", drawn)
        return
    rows, lines = judge(arguments.folder)
    if not rows:
        parser.error(f"{arguments.folder} holds no draws")
    write_results("speculation-draws", rows, "\n".join([__doc__ or "", *lines]))


if __name__ == "__main__":
    main()

"""What `--kv-keep` costs and gives: perplexity, a needle in a haystack, questions, the processor's time of a token.

    kv_keep.py --text FILE [--prompt 1536] [--tokens 192] [--needles 8] [--tasks 8] [--keep 128,256,512] MODEL.gguf...

A text is read as a prompt, with all of its rows; what follows is given token by token, as an answer is made, so that
each looks at what its setting lets it look at. *Perplexity* is of that continuation. *Needle*: one sentence with a
number is hidden somewhere in the text, and the beginning of that sentence follows after the text; found is a number of
which each digit is the most likely next token. *Questions* are of the kinds that `_kv_keep_tasks.py` makes: right is
the share of answers of which each token is the likeliest (of a line of code: the share of its tokens), `loss` the mean
of -log p over the tokens of answers. All settings see the same cells, one after another. Memory is the same for all:
rows that are not looked at stay. With `--only-tasks` nothing else is measured.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import ROOT, table, write_results
from _kv_keep_tasks import Task, make_tasks

from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.streaming.chosen_rows import ChosenRows

WIDTH, EVERYTHING = 256, 1 << 30
LEAST_BLOCKS = 512  # tokens, of which blocks of 256 can be chosen
NEEDLE, NUMBERS = " The secret number of the old lighthouse is {}.", (7481, 2960, 5137, 8026, 3694, 1852, 9473, 6215)
FIELDS = ("model", "setting", "perplexity", "against_all", "needles", "cpu_ms_per_token", "share")
KINDS = ("lookup", "passages", "topics", "code")
TASK_FIELDS = ("model", "setting", *(f"{kind}_{what}" for kind in KINDS for what in ("right", "loss")))


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


def settings_of(keeps: Sequence[int]) -> list[tuple[str, int]]:
    """Return the settings, of which the first looks at everything."""
    kinds = ((kind, keep) for keep in keeps for kind in ("pages", "blocks", "window"))
    return [("pages", EVERYTHING), *(one for one in kinds if one[0] != "blocks" or one[1] >= LEAST_BLOCKS)]


def named(kind: str, keep: int) -> str:
    """Return what a setting is called."""
    return "all" if keep == EVERYTHING else f"{kind} {keep}"


def answer_tasks(path: Path, tasks: Sequence[Task], keeps: Sequence[int], n_prompt: int) -> list[dict[str, Any]]:
    """Return a row for each setting: how much of the answers of each kind is right."""
    settings, run = settings_of(keeps), Run(path, n_prompt + 128)
    right: dict[tuple[str, int], list[float]] = {}
    losses: dict[tuple[str, int], list[float]] = {}
    for task in tasks:
        question, answer = run.tokens(task.question), run.tokens(task.answer)
        prompt = task.prompt(run.tokens, n_prompt)
        asked = question or [prompt.pop()]
        run.read(prompt)
        for i, setting in enumerate(settings):
            loss, best, _, _ = run.score([*asked, *answer], *setting)
            of_answer = best[len(asked) - 1 :]
            is_whole = float(all(of_answer))
            right.setdefault((task.kind, i), []).append(
                sum(of_answer) / len(of_answer) if task.kind == "code" else is_whole
            )
            losses.setdefault((task.kind, i), []).extend(loss[len(asked) - 1 :])
    run.engine.close()
    rows: list[dict[str, Any]] = []
    for i, setting in enumerate(settings):
        row: dict[str, Any] = {"model": path.stem, "setting": named(*setting)}
        for kind in KINDS:
            row[f"{kind}_right"] = round(float(np.mean(right[kind, i])), 3)
            row[f"{kind}_loss"] = round(float(np.mean(losses[kind, i])), 3)
        rows.append(row)
    return rows


def measure(
    path: Path, text: str, keeps: Sequence[int], n_prompt: int, n_tokens: int, n_needles: int
) -> list[dict[str, Any]]:
    """Return a row for each setting."""
    settings = settings_of(keeps)
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
                "setting": named(kind, keep),
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
    parser.add_argument("--tasks", type=int, default=8, help="of each kind; 0: none")
    parser.add_argument("--only-tasks", action="store_true")
    parser.add_argument("--keep", default="128,256,512")
    parser.add_argument("--name", default="kv-keep")
    arguments = parser.parse_args()
    text, rows = arguments.text.read_text(encoding="utf-8"), list[dict[str, Any]]()
    keeps, tasks = [int(keep) for keep in arguments.keep.split(",")], make_tasks(ROOT, arguments.tasks)
    answered = list[dict[str, Any]]()
    for path in arguments.models:
        if not arguments.only_tasks:
            rows += measure(path, text, keeps, arguments.prompt, arguments.tokens, arguments.needles)
        if tasks:
            answered += answer_tasks(path, tasks, keeps, arguments.prompt)
        for row in (*rows, *answered):
            if row["model"] == path.stem:
                print(*(f"{field}={value}" for field, value in row.items()), flush=True)
    parts = [f"Text: {arguments.text.name}; {arguments.prompt:,} tokens are read.", *[table(FIELDS, rows)] * bool(rows)]
    if answered:
        parts += [f"Questions, {arguments.tasks} of each kind:", table(TASK_FIELDS, answered)]
    write_results(arguments.name, [*rows, *answered], "\n\n".join(parts))


if __name__ == "__main__":
    main()

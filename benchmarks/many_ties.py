"""How often an answer that shares its passes differs from the same answer alone, and how close the choice then was.

    many_ties.py MODEL [--memory 64GiB] [--answers 64] [--tokens 64] [--parallel 16] [--kv-type f16]
                 [--peer LLAMA-SERVER]

Kernels of different widths add in another order, so that logits differ in the last bits, and two best tokens that are
as close as that may change places. Each answer is made alone, greedily, then all of them in shared passes, in the same
model. They are compared up to the first difference: what follows is another text. `margin` is by how much the token
that was chosen alone was likelier, in nats. Reach: fewer than 1 difference in 200 tokens compared. Seconds do not
matter here. Prompts are pieces of a text, which leave much open, or with `--questions` what a chat's user asks; there
an answer that ends where the other goes on differs too. With `--peer` the same is asked of llama-server, with as many
slots, one request after the other and then all at once: whose kernels they are. It does not say margins.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import WIKITEXT, file_at, need, program_at, write_results
from _http_load import ask_at
from _server_process import running
from goodput import free_port

from edge_run import Generation, Model
from edge_run.base.units import parse_size

LONGEST_S = 3600.0


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=file_at, nargs="+")
    parser.add_argument("--memory", default="64GiB")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=48)
    parser.add_argument("--parallel", type=int, default=16)
    parser.add_argument("--kv-type", default="f16")
    parser.add_argument("--exact", action="store_true", help="then there must be no difference")
    parser.add_argument("--text", type=file_at, default=WIKITEXT)
    parser.add_argument("--questions", type=file_at, help="lines of JSON with a question each: prompts of a chat")
    parser.add_argument("--peer", type=program_at, help="llama-server")
    parser.add_argument("--name", default="many-ties")
    given = parser.parse_args()
    need(given.questions or given.text)
    rows = [row for path in given.models for row in measured(path, given)]
    head = "| model | answers by | tokens compared | differences | one in | largest margin, nats |"
    lines = [head, "|---|---|---|---|---|---|"]
    for model, by in dict.fromkeys((row["model"], row["by"]) for row in rows):
        some = [row for row in rows if (row["model"], row["by"]) == (model, by)]
        compared, margins = sum(row["compared"] for row in some), [row["margin"] for row in some if row["differs"]]
        rate = f"{compared / len(margins):.0f}" if margins else "none"
        known = [margin for margin in margins if not math.isnan(margin)]
        largest = f"{max(known, default=0.0):.4f}" if known or not margins else "not said"
        lines.append(f"| {model} | {by} | {compared} | {len(margins)} | {rate} | {largest} |")
    write_results(given.name, rows, f"{(__doc__ or '').strip()}\n\n" + "\n".join(lines))


def measured(path: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Return where each answer in shared passes leaves the one alone."""
    longest = 400 if given.questions else given.prompt
    context = given.parallel * (longest + given.tokens + 16)
    options: dict[str, Any] = {
        "max_tokens": given.tokens,
        "temperature": 0,
        "ignore_eos": not given.questions,
        "top_logprobs": 2,
    }
    config = {"sequences": given.parallel, "context_tokens": context, "exact": given.exact}
    with Model(path, memory=parse_size(given.memory), kv_type=given.kv_type, **config) as model:
        prompts = prompts_of(model, given)
        alone = [model.generate(prompt, **options).result() for prompt in prompts]
        together = dict[int, Generation]()
        for number, piece in model.generate_many(prompts, **options):
            if isinstance(piece, Exception):
                raise piece
            if piece.generation:
                together[number] = piece.generation
    answers = [(alone[number].token_ids, together[number].token_ids) for number in range(len(prompts))]
    rows = compared_to(path, "edge-run", answers)
    for row, one in zip(rows, alone, strict=True):
        row["margin"] = margin_at(one, row["compared"] - 1) if row["differs"] else 0.0
    return rows + (compared_to(path, "llama-server", peer_answers(path, prompts, given)) if given.peer else [])


def compared_to(path: Path, by: str, answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[dict[str, Any]]:
    """Return up to where each pair of answers, one alone and one in shared passes, is the same. Margins are unknown."""
    rows = []
    for number, (alone, together) in enumerate(answers):
        # Where one ends and the other goes on, the end was chosen there: a token too, which is in neither.
        pairs = itertools.zip_longest(alone, together)
        first = next((place for place, (left, right) in enumerate(pairs) if left != right), None)
        found = {"compared": len(alone) if first is None else first + 1, "differs": first is not None}
        rows.append({"model": path.stem, "by": by, "answer": number, **found, "margin": math.nan})
    print(path.stem, by, sum(row["compared"] for row in rows), sum(row["differs"] for row in rows), flush=True)
    return rows


def peer_answers(path: Path, prompts: list[list[int]], given: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Return the answers of llama-server: each alone, and in shared passes."""
    port, context = free_port(), given.parallel * (max(map(len, prompts)) + given.tokens + 16)
    words = [
        given.peer,
        "-m",
        path,
        "-c",
        context,
        "-np",
        given.parallel,
        "-kvu",
        "-t",
        2,
        "--port",
        port,
        "--no-webui",
    ]
    with tempfile.TemporaryFile("w+") as log, running(words, port, log):
        asked = [(0.0, prompt, given.tokens) for prompt in prompts]
        more = {"cache_prompt": False, "return_tokens": True, "ignore_eos": not given.questions}
        alone = [ask_at("127.0.0.1", port, [one], LONGEST_S, **more)[0] for one in asked]
        together = ask_at("127.0.0.1", port, asked, LONGEST_S, **more)
    if not all(answer.is_whole for answer in (*alone, *together)):
        raise SystemExit("llama-server left an answer unfinished")
    return [(one.token_ids, other.token_ids) for one, other in zip(alone, together, strict=True)]


def prompts_of(model: Model, given: argparse.Namespace) -> list[list[int]]:
    """Return what the answers go on from."""
    if given.questions:
        lines = given.questions.read_text("utf-8").splitlines()[: given.answers]
        chats = [[{"role": "user", "content": json.loads(line)["question"]}] for line in lines]
        return [model.prompt_tokens(model.chat_prompt(chat)) for chat in chats]
    text = model.tokenize(given.text.read_text("utf-8", "replace")[:1_000_000], add_special=False)
    starts = np.linspace(0, len(text) - given.prompt - 1, given.answers, dtype=int)
    return [text[start : start + given.prompt] for start in starts]


def margin_at(answer: Generation, place: int) -> float:
    """Return by how much the token at a place, the best one, was likelier than the second best; unknown of an end."""
    if place >= len(answer.logprobs):
        return math.nan
    _, best, second = answer.logprobs[place]
    return best[1] - second[1]


if __name__ == "__main__":
    main()

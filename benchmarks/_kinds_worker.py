"""Answers to prompts of the Spec-Bench kinds by one model, in one process, for `kinds.py`. Prints JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _box import NOVELS, SPEC_BENCH

from edge_run import Model
from edge_run.devices.host.memory import process_memory

CATEGORIES = {
    "code": "coding",
    "questions": "qa",
    "chat": "roleplay",
    "translation": "translation",
    "summaries": "summarization",
}
KINDS = (*CATEGORIES, "prose")
MOST_CHARACTERS = 2000


def prompt(kind: str, number: int) -> str:
    """Return the prompt of a kind: of `prose` a part of a novel to go on with, of others a question that may be cut."""
    if kind == "prose":
        text = NOVELS.read_text()
        start = text.index("\n\n", 50_000 + 200_000 * number)
        return text[start : start + MOST_CHARACTERS // 2].strip()
    lines = SPEC_BENCH.read_text().splitlines()
    entries = [entry for line in lines if (entry := json.loads(line))["category"] == CATEGORIES[kind]]
    return str(entries[number]["turns"][0])[:MOST_CHARACTERS]


def answers(model: Model, kinds: list[str], number: int, n_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield for each kind the answer's tokens, and what it took."""
    for kind in kinds:
        text = prompt(kind, number)
        whole = text if kind == "prose" else model.chat_prompt([{"role": "user", "content": text}])
        *_, last = model.generate(whole, max_tokens=n_tokens, temperature=0)
        made = last.generation
        assert made is not None
        yield {
            "kind": kind,
            "prompt_tokens": made.prompt_tokens,
            "first_token_s": made.ttft_s,
            "tokens": made.completion_tokens,
            "tokens_per_s": made.decode_tokens_per_s,
            "answer": made.token_ids,
            "bytes_per_token": made.io.bytes_per_token,
            "efficiency": made.io.efficiency,
            "tokens_per_pass": made.speculation.tokens_per_pass,
            "near_ties": made.speculation.near_ties,
        }


def main() -> None:
    """Open the model, answer, and print one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--number", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--cache", type=Path)
    arguments = parser.parse_args()
    options: dict[str, Any] = {"draft": arguments.draft} if arguments.draft else {"speculate": "off"}
    options["cache_folder"] = arguments.cache
    with Model(arguments.model, memory=arguments.memory, backend=arguments.backend, **options) as model:
        rows = list(answers(model, arguments.kinds, arguments.number, arguments.tokens))
        plan, repacked = model.plan, model.numerics.repacked
    print(
        json.dumps({"mode": plan.mode, "repacked": repacked, "peak_bytes": process_memory().peak_bytes, "rows": rows})
    )


if __name__ == "__main__":
    main()

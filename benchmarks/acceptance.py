"""How far guesses come true on real text, by kind of text and by depth; trees against chains. Counts, no clock.

    acceptance.py answers FOLDER MODEL [--kinds code ...] [--prompts 2] [--tokens 64]
    acceptance.py count FOLDER MODEL --draft DRAFT [--kinds code ...] [--ways tree ...]
    acceptance.py report FOLDER [--name WHAT]

`answers` has the model answer prompts of each kind greedily, and keeps prompts and answers in the folder. `count` makes
guesses for each answer as a run would (`SpeculativeSession`, the draft model itself), in passes of 16 tokens, in place
of the model with a double that knows the answer: what comes true hangs on the texts alone. For each way it keeps how
many guesses each pass accepted. `report` writes the results. Kinds: those of `kinds.py`, and `editing`: a file of this
repository with the request to rename something in it, where the answer repeats the prompt. Ways: `tree` and `chain` of
the draft model, and `lookup`, guesses from the text so far, alone. Tokens a pass are the certain one and the guesses
that came true; acceptance at a depth is the share of passes that went so far of those that went one less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _box import ROOT, write_results
from _kinds_worker import KINDS, prompt

from edge_run import Model
from edge_run.base.config import ModelConfig
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.partition.width_costs import WidthCosts
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.llama.model import LlamaModel
from edge_run.runtime.speculation.draft_model import DraftModel
from edge_run.runtime.speculation.drafting import Pace
from edge_run.runtime.speculation.session import SpeculativeSession
from edge_run.runtime.speculation.shared_drafters import SharedDrafters
from edge_run.runtime.speculation.shared_guesses import SharedGuesses
from edge_run.runtime.speculation.tally import SpeculationTally
from edge_run.runtime.speculation.width_control import ONE_TEXT, Offer, WidthControl
from edge_run.tiers.gguf import read_gguf

EDITING = "editing"
ALL_KINDS = (*KINDS, EDITING)
EDITED = (("benchmarks/budgets.py", "rows"), ("benchmarks/memory.py", "rows"), ("benchmarks/resident.py", "rows"))
EDITED_CHARACTERS, EDITED_TOKENS = 1500, 192
CONTEXT_TOKENS = 2048
WAYS = ("tree", "chain", "lookup")
WIDTH = 16
MOST_BRANCHES = 16
DEPTHS = 8


def editing_prompt(number: int) -> str:
    """Return a request to rename something in a file of this repository."""
    path, name = EDITED[number % len(EDITED)]
    code = (ROOT / path).read_text(encoding="utf-8")
    start = code.index("\ndef ")
    code = code[start : start + EDITED_CHARACTERS].strip().rpartition("\n")[0]
    return f"Rename `{name}` to `records` in this code. Answer with all of the code, changed.\n\n```python\n{code}\n```"


class Known:
    """A decoder that knows how the text goes on: its logits say so, wherever a guess lies. One text at a time."""

    def __init__(self, text: Sequence[int], vocabulary: int, *, can_branch: bool, width: int) -> None:
        self._text, self._vocabulary = text, vocabulary
        self.capabilities = Capabilities(
            context_tokens=CONTEXT_TOKENS,
            micro_batch_tokens=max(width, 2),
            sequences=1 + MOST_BRANCHES * can_branch,
            vocabulary=vocabulary,
            can_rewind=True,
            can_branch=can_branch,
            outputs_per_pass=max(width, 2),
        )

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        """Return for each wanted token the logits that choose what the known text has after its position."""
        wanted = [token for token in batch if token.wants_logits]
        rows = np.zeros((len(wanted), self._vocabulary), np.float32)
        for row, token in zip(rows, wanted, strict=True):
            if token.position + 1 < len(self._text):
                row[self._text[token.position + 1]] = 1.0
        return rows

    def rewind(self, sequence: int, position: int) -> int:
        """Forget from `position` on."""
        return position

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        """Let branches hold what `sequence` holds."""

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        """Let `sequence` go on as `branch` does."""


class FixedWidth(WidthControl):
    """Always guesses, and has every pass as wide as there are guesses for."""

    pace = Pace()  # what a guess takes does not count

    def __init__(self, width: int) -> None:
        super().__init__(WidthCosts(), width)

    def wants_guesses(self, hoped: Sequence[Offer] = ONE_TEXT) -> bool:
        """Return True."""
        return True

    def best(self, offers: Sequence[Offer]) -> int:
        """Return the widest one."""
        return len(offers) - 1


def accepted(draft: DraftModel, text: Sequence[int], start: int, vocabulary: int, way: str) -> Iterator[int]:
    """Yield for each pass over text[start:] how many of its guesses came true."""
    is_tree = way != "chain"
    is_lookup = way == "lookup"
    guesses = SharedGuesses(
        FixedWidth(WIDTH),
        SpeculationTally(way),
        SharedDrafters(None if is_lookup else draft, uses_lookup=is_lookup),
        WIDTH - 1,
        branches=range(1, 1 + MOST_BRANCHES) if is_tree else (),
    )
    session = SpeculativeSession(Known(text, vocabulary, can_branch=is_tree, width=WIDTH), guesses)
    session.feed(text[:start])
    passes = n_accepted = 0
    for token in text[start:-1]:
        session.step(token)
        figures = session.speculation()
        if passes and figures.passes > passes:
            yield figures.accepted - n_accepted
            n_accepted = figures.accepted
        passes = figures.passes


def answer(model_file: Path, folder: Path, kinds: Sequence[str], n_prompts: int, n_tokens: int) -> None:
    """Keep the model's answers to prompts of each kind."""
    folder.mkdir(parents=True, exist_ok=True)
    with Model(model_file, context_tokens=CONTEXT_TOKENS, speculate="off") as model:
        for kind in kinds:
            for number in range(n_prompts):
                path = folder / f"{kind}-{number}.json"
                if path.exists():
                    continue
                text = editing_prompt(number) if kind == EDITING else prompt(kind, number)
                whole = text if kind == "prose" else model.chat_prompt([{"role": "user", "content": text}])
                most = EDITED_TOKENS if kind == EDITING else n_tokens
                *_, last = model.generate(whole, max_tokens=most, temperature=0)
                made = last.generation
                assert made is not None
                tokens = model.prompt_tokens(whole)
                assert len(tokens) == made.prompt_tokens, (len(tokens), made.prompt_tokens)
                path.write_text(json.dumps({"prompt": list(tokens), "answer": list(made.token_ids)}))
                print(path.name, made.prompt_tokens, made.completion_tokens, flush=True)


def count(model_file: Path, draft_file: Path, folder: Path, kinds: Sequence[str], ways: Sequence[str]) -> None:
    """Keep what of the guesses for each answer comes true."""
    config = ModelConfig(draft=draft_file, context_tokens=CONTEXT_TOKENS, draft_tokens=47)
    file = DraftFile.read(draft_file, config, read_gguf(model_file), is_tried=True)
    with LlamaModel([model_file]) as target, DraftModel(file) as draft:
        draft.follow_vocabulary(target)
        for path in sorted(folder.glob("*.json")):
            kind = path.stem.rpartition("-")[0]
            if kind not in kinds:
                continue
            known, result = json.loads(path.read_text()), folder / f"{path.stem}.counts"
            text, start = known["prompt"] + known["answer"], len(known["prompt"])
            found: dict[str, list[int]] = json.loads(result.read_text()) if result.exists() else {}
            for way in ways:
                if way not in found:
                    found[way] = list(accepted(draft, text, start, target.vocabulary, way))
                    result.write_text(json.dumps(found))  # what was counted is not counted again
            print(
                path.stem,
                {way: round(1 + statistics.fmean(some), 2) for way, some in found.items() if some},
                flush=True,
            )


def report(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Return a row for each kind, way and width, and the tables."""
    counted: dict[tuple[str, str], list[list[int]]] = {}
    for path in sorted(folder.glob("*.counts")):
        for way, passes in json.loads(path.read_text()).items():
            counted.setdefault((path.stem.rpartition("-")[0], way), []).append(passes)
    rows = []
    for (kind, way), answers in counted.items():
        passes = list(itertools.chain.from_iterable(answers))
        row = {"kind": kind, "way": way, "width": WIDTH, "answers": len(answers), "passes": len(passes)}
        row["tokens_per_pass"] = round(1 + statistics.fmean(passes), 3)
        rows.append(row | {f"depth_{depth}": share for depth, share in enumerate(by_depth(passes), 1)})
    of = {(row["kind"], row["way"]): row for row in rows}
    kinds = [kind for kind in ALL_KINDS if any(known == kind for known, _ in of)]
    ways = [way for way in WAYS if any(known == way for _, known in of)]
    table = [f"| tokens a pass of {WIDTH} (answers) | {' | '.join(ways)} |", "|---" * (len(ways) + 1) + "|"]
    for kind in kinds:
        cells = (_cell(of.get((kind, way))) for way in ways)
        table.append(f"| {kind} | {' | '.join(cells)} |")
    for way in ways:
        table += ["", f"| acceptance by depth, {way} | {' | '.join(map(str, range(1, DEPTHS + 1)))} |"]
        table.append("|---" * (DEPTHS + 1) + "|")
        for kind in (kind for kind in kinds if (kind, way) in of):
            shares = (str(of[kind, way][f"depth_{depth}"]) for depth in range(1, DEPTHS + 1))
            table.append(f"| {kind} | {' | '.join(shares)} |")
    return rows, "\n".join(table)


def _cell(row: dict[str, Any] | None) -> str:
    return f"{row['tokens_per_pass']:.2f} ({row['answers']})" if row else "-"


def by_depth(passes: Sequence[int]) -> Iterator[float | str]:
    """Yield the share of passes that went to each depth, of those that went to the one before; `-` where none did."""
    for depth in range(1, DEPTHS + 1):
        before = sum(length >= depth - 1 for length in passes)
        yield round(sum(length >= depth for length in passes) / before, 2) if before else "-"


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("answers", "count", "report"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=ALL_KINDS, default=ALL_KINDS)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--name", default="", help="goes on that of the results")
    arguments = parser.parse_args()
    if arguments.do != "report" and not arguments.model:
        parser.error(f"{arguments.do}: which MODEL?")
    if arguments.do == "count" and not arguments.draft:
        parser.error("count: whose guesses? Name a --draft")
    kept = {"count": "*.json", "report": "*.counts"}.get(arguments.do)
    if kept and not any(arguments.folder.glob(kept)):
        parser.error(f"{arguments.folder} holds nothing to {arguments.do}")
    if arguments.do == "answers":
        answer(arguments.model, arguments.folder, arguments.kinds, arguments.prompts, arguments.tokens)
    elif arguments.do == "count":
        count(arguments.model, arguments.draft, arguments.folder, arguments.kinds, arguments.ways)
    else:
        rows, table = report(arguments.folder)
        write_results("-".join(["acceptance", *filter(None, [arguments.name])]), rows, f"{__doc__}\n{table}")


if __name__ == "__main__":
    main()

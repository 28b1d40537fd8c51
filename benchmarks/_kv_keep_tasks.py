"""Questions about long texts, of a few kinds as LongBench has them, made of this repository's own pages and tests.

*lookup* (questions on one document): what is the default of a flag, of which one row of a long table says so.
*passages* (passage retrieval): which of many numbered paragraphs says a sentence.
*topics* (few-shot learning): which page a sentence is from, after examples.
*code* (completion): the next line of a test, after what comes before it in its file.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FLAG = re.compile(r"^\| `(--[a-z-]+)`[^|]*\| (\w+) \|", re.MULTILINE)
PAGES = ("usage", "serving", "mesh", "how-it-works")
LEAST_LINE, MOST_SENTENCE, MOST_PARAGRAPH = 30, 110, 260


@dataclass(frozen=True, slots=True)
class Task:
    """A text, a question after it, and its answer.

    before, evidence, after: the text; what surrounds the evidence may be cut to size. place: where the evidence lies,
    0 to 1.
    """

    kind: str
    before: str
    evidence: str
    after: str
    place: float
    question: str
    answer: str

    def prompt(self, tokens: Callable[[str], list[int]], n_tokens: int) -> list[int]:
        """Return the text in at most `n_tokens` tokens; tokens: makes them of a text."""
        evidence = tokens(self.evidence)[-n_tokens:]
        room = n_tokens - len(evidence)
        before, after = tokens(self.before), tokens(self.after)
        n_before = min(len(before), max(round(self.place * room), room - len(after)))
        return [*before[len(before) - n_before :], *evidence, *after[: room - n_before]]


def make_tasks(root: Path, n_each: int) -> list[Task]:
    """Return `n_each` tasks of each kind, always the same ones."""
    chance = random.Random(0)
    kinds = (_lookups, _passages, _topics, _code)
    return [task for kind in kinds for task, _ in zip(kind(root, chance, n_each), range(n_each), strict=False)]


def _lookups(root: Path, chance: random.Random, n_each: int) -> Iterator[Task]:
    page = (root / "docs" / "reference.md").read_text(encoding="utf-8")
    matches = list(FLAG.finditer(page))
    times = Counter(match[1] for match in matches)
    found = [match for match in matches if times[match[1]] == 1 and match[2] not in ("none", "no", "off", "required")]
    for number, match in enumerate(chance.sample(found, n_each)):
        stop = page.index("\n", match.end())
        question = f"\n\nQuestion: What is the default of `{match[1]}`?\nAnswer: The default of `{match[1]}` is"
        place = (number + 0.5) / n_each
        yield Task(
            "lookup", page[: match.start()], page[match.start() : stop], page[stop:], place, question, f" {match[2]}"
        )


def _passages(root: Path, chance: random.Random, n_each: int) -> Iterator[Task]:
    paragraphs = [part for name in PAGES for part in _paragraphs(root, name)]
    for number in range(n_each):
        some = chance.sample(paragraphs, 16)
        asked = (2 * number + 1) * len(some) // (2 * n_each)
        numbered = [f"Paragraph {i + 1}: {text[:MOST_PARAGRAPH]}\n\n" for i, text in enumerate(some)]
        said = some[asked][:MOST_PARAGRAPH].split(" ")
        question = f'\nThe words "{" ".join(said[3:15])}" are from Paragraph'
        parts = "".join(numbered[:asked]), numbered[asked], "".join(numbered[asked + 1 :])
        yield Task("passages", *parts, asked / len(some), question, f" {asked + 1}")


def _topics(root: Path, chance: random.Random, n_each: int) -> Iterator[Task]:
    sentences = [(name, text[:MOST_SENTENCE]) for name in PAGES for text in _paragraphs(root, name)]
    for _ in range(n_each):
        some = chance.sample(sentences, 33)
        examples = "".join(f"Text: {text}\nPage: {name}\n\n" for name, text in some[:-1])
        name, text = some[-1]
        yield Task("topics", "", examples, "", 0.0, f"Text: {text}\nPage:", f" {name}")


def _code(root: Path, chance: random.Random, n_each: int) -> Iterator[Task]:
    files = sorted((root / "tests" / "unit" / "tiers").rglob("test_*.py"))
    for path in chance.sample(files, n_each):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        able = [i for i in range(len(lines) // 2, len(lines)) if len(lines[i]) > LEAST_LINE]
        at = chance.choice(able or [len(lines) - 1])
        yield Task("code", "".join(lines[:at]), "", "", 1.0, "", lines[at].rstrip("\n"))


def _paragraphs(root: Path, name: str) -> Sequence[str]:
    """Return the paragraphs of prose of a page, each as one line."""
    page = (root / "docs" / f"{name}.md").read_text(encoding="utf-8")
    parts = (" ".join(part.split()) for part in page.split("\n\n"))
    return [part for part in parts if part[:1].isalpha() and len(part) > MOST_SENTENCE]

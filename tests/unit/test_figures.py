"""The figures that the README gives are those of result files, the newest of their kind.

In the part on what was measured, each paragraph, list item or table is held against the results that it links to, or
else against those of the last one before it that links to any. Each number must be there, as it is or rounded.
"""

import csv
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LINK = re.compile(r"\]\(benchmarks/results/([\w.-]+)\.md\)")
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?!\w|\.\d)")
UNREAD = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")


def numbers(text: str) -> list[str]:
    """Return the numbers of a text as they are written, but for those in code, in links and in names."""
    return [found.rstrip(",").replace(",", "") for found in NUMBER.findall(UNREAD.sub(" ", text))]


@cache
def found_in(name: str) -> tuple[set[str], list[float]]:
    """Return the numbers of a result: as its report writes them, and as they are in its table."""
    report = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    rows = RESULTS / f"{name}.csv"
    cells = [cell for row in csv.reader(rows.read_text().splitlines()) for cell in row] if rows.exists() else []
    written = set(re.findall(r"\d+(?:\.\d+)?", report.replace(",", "")))
    exact = [float(part) for cell in cells for part in re.findall(r"\d+\.\d+", cell)]
    return written, exact + [float(one) for one in written if "." in one]


def is_in(number: str, names: list[str]) -> bool:
    """Return whether one of the results has `number`, which may be rounded with three digits or a point."""
    decimals = len(number.partition(".")[2])
    may_be_rounded = decimals or len(number) > 2
    for name in names:
        written, exact = found_in(name)
        if number in written or (may_be_rounded and any(round(one, decimals) == float(number) for one in exact)):
            return True
    return False


def claims(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each piece of the part on what was measured, and the results that it rests on."""
    part = text.partition("## What was measured\n")[2].partition("\n## ")[0]
    names: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\* )", part):
        named = LINK.findall(block)
        names = named or names
        if block.strip():
            yield block, names


def wrong(text: str) -> list[str]:
    """Return what is claimed and not measured."""
    return [
        f"{number}: not in {', '.join(names) or 'a result that is named'}: {block.strip()[:60]}"
        for block, names in claims(text)
        for number in numbers(block)
        if not is_in(number, names)
    ]


def test_figures_of_the_readme_are_those_of_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sum(len(numbers(block)) for block, _ in claims(text)) > 50, "the part on what was measured was not found"
    assert wrong(text) == []


def test_figures_are_of_the_newest_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    newest: dict[str, str] = {}
    for path in sorted(RESULTS.glob("*.md")):
        newest[path.stem[11:]] = path.stem
    assert [name for name in LINK.findall(text) if newest.get(name[11:]) != name] == []


@pytest.mark.parametrize(
    ("claim", "is_true"),
    [
        ("12.8 times, of 16 answers", True),
        ("13.1 times, of 16 answers", False),
        ("at 4.13 times", True),
        ("at 4.14 times", False),
        ("`--width 77`, 16", True),
        ("77 answers", False),
        ("1,024 answers", False),
    ],
)
def test_a_figure_that_is_not_measured_is_found(claim: str, is_true: bool) -> None:
    text = f"## What was measured\n\nMuch ([many](benchmarks/results/2026-11-25-many.md)): {claim}.\n\n## Next\n\n99\n"
    assert (wrong(text) == []) is is_true

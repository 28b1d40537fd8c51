"""The figures that the README and the docs give are those of result files, the newest of their kind.

In docs/measurements.md, and the README's part on what was measured, each paragraph, list item or row is held against
the results that it links to, or else against those of the last one before it that links to any. Elsewhere, each
sentence that names a benchmark or a result is, and the table after it: against the newest results of that benchmark,
and against the script, which says what is done. Each number must be there, as it is, rounded, or in bytes.
"""

import csv
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
LINK = re.compile(r"\]\((?:\.\./)?benchmarks/results/([\w.-]+)\.md\)")
NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?!\w|\.\d)")
RESULT = re.compile(r"benchmarks/results/([\w.-]+)\.md")
SCRIPT = re.compile(r"(?:benchmarks/|`)(\w+)\.py\b")
BLOCKS = re.compile(r"\n\s*\n|\n(?=\* |- )")
SENTENCES = re.compile(r"(?<=[.:])\s+(?=[A-Z`*])")
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
UNIT = re.compile(r"\s*(KiB|MiB|GiB)\b")
UNIT_BYTES = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MEASURED = "# What was measured\n"
OF_MEASUREMENTS = [ROOT / "README.md", ROOT / "docs" / "measurements.md"]
UNREAD = re.compile(r"`[^`]*`|\]\([^)]*\)|<!--.*?-->")


def numbers(text: str) -> list[tuple[str, int]]:
    """Return the numbers of a text as they are written, and how many bytes their unit is, 0 for other units.

    Those in code, in links and in names are left out.
    """
    text = RESULT.sub(" ", UNREAD.sub(" ", text))
    found = []
    for match in NUMBER.finditer(text):
        unit = UNIT.match(text, match.end())
        found.append((match[0].rstrip(",").replace(",", ""), UNIT_BYTES[unit[1]] if unit else 0))
    return found


@cache
def found_in(name: str) -> tuple[set[str], list[float], list[int]]:
    """Return the numbers of a result, or of a script: as its text writes them, those with a point, and whole ones."""
    script = ROOT / "benchmarks" / f"{name}.py"
    report = (script if script.exists() else RESULTS / f"{name}.md").read_text(encoding="utf-8")
    report = re.sub(r"(?<=\d)[_,](?=\d{3})", "", report)
    rows = RESULTS / f"{name}.csv"
    cells = [cell for row in csv.reader(rows.read_text().splitlines()) for cell in row] if rows.exists() else []
    written = set(re.findall(r"\d+(?:\.\d+)?", report))
    exact = [float(part) for cell in cells for part in re.findall(r"\d+\.\d+", cell)]
    whole = [int(cell) for cell in cells if cell.isdecimal()]
    return written, exact + [float(one) for one in written if "." in one], whole


def is_in(number: str, names: Sequence[str], unit_bytes: int = 0) -> bool:
    """Return whether one of the results has `number`, which may be rounded with three digits or a point."""
    decimals = len(number.partition(".")[2])
    may_be_rounded = decimals or len(number) > 2
    for name in names:
        written, exact, whole = found_in(name)
        inexact = exact + ([size / unit_bytes for size in whole] if unit_bytes else [])
        if number in written or (may_be_rounded and any(round(one, decimals) == float(number) for one in inexact)):
            return True
    return False


def measured(text: str) -> str:
    """Return the part on what was measured: of the README a chapter, of docs/measurements.md all."""
    before, title, after = text.partition(MEASURED)
    return after.partition("\n## ")[0] if before.endswith("#") else after if title else ""


def claims(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each piece of the part on what was measured, and the results that it rests on."""
    names: list[str] = []
    for block in re.split(r"\n\s*\n|\n(?=\* |\| )", measured(text)):
        named = LINK.findall(block)
        names = named or names
        if block.strip():
            yield block, names


@cache
def newest() -> dict[str, str]:
    """Return by what a result is of the newest one of that kind."""
    return {path.stem[11:]: path.stem for path in sorted(RESULTS.glob("*.md"))}


def resting_on(text: str) -> list[str]:
    """Return the results and scripts that a piece of text names."""
    scripts = [name for name in SCRIPT.findall(text) if (ROOT / "benchmarks" / f"{name}.py").exists()]
    kinds = tuple(name.replace("_", "-") for name in scripts)
    of_scripts = [stem for kind, stem in newest().items() if any(f"{kind}-".startswith(f"{own}-") for own in kinds)]
    return [*RESULT.findall(text), *of_scripts, *scripts]


def sentences_that_claim(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each sentence that names a result or a benchmark, the table after it, and rows that name one themselves.

    With each comes what it rests on.
    """
    names: list[str] = []
    for block in BLOCKS.split(CODE.sub("", text)):
        if block.lstrip().startswith("|"):
            yield from [(block, names)] if names else ((row, resting_on(row)) for row in block.splitlines())
            names = []
            continue
        names = []
        for sentence in SENTENCES.split(block):
            if named := resting_on(sentence):
                names = named
                yield sentence, named


def wrong(found: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Return what is claimed and not measured."""
    return [
        f"{number}: not in {', '.join(names) or 'a result that is named'}: {block.strip()[:60]}"
        for block, names in found
        for number, unit_bytes in numbers(block)
        if not is_in(number, names, unit_bytes)
    ]


@pytest.mark.parametrize(("page", "n_least"), [(OF_MEASUREMENTS[0], 30), (OF_MEASUREMENTS[1], 200)])
def test_figures_of_what_was_measured_are_those_of_results(page: Path, n_least: int) -> None:
    text = page.read_text(encoding="utf-8")
    assert sum(len(numbers(block)) for block, _ in claims(text)) > n_least, "what was measured was not found"
    assert wrong(claims(text)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_elsewhere_are_those_of_results_too(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = list(sentences_that_claim(text.replace(measured(text), "") if page in OF_MEASUREMENTS else text))
    assert found or page.name not in ("README.md", "how-it-works.md"), "no sentence was found that names a benchmark"
    assert wrong((block, names) for block, names in found if names) == []


@pytest.mark.parametrize("page", OF_MEASUREMENTS, ids=lambda page: page.name)
def test_figures_are_of_the_newest_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [name for name in LINK.findall(text) if newest().get(name[11:]) != name] == []


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
    assert (wrong(claims(text)) == []) is is_true


@pytest.mark.parametrize(
    ("claim", "is_true"),
    [
        ("In 700 MiB 12.8 times (`benchmarks/many.py`). Other things are 77.", True),
        ("In 701 MiB 12.8 times (`benchmarks/many.py`).", False),
        ("So much as 77 in 700 MiB ([many](../benchmarks/results/2026-11-25-many.md)).", False),
        ("It was measured (`many.py`):\n\n| 12.8 | 4.13 |\n", True),
        ("It was measured (`many.py`):\n\n| 12.8 | 417.3 |\n", False),
        ("Of tables:\n\n| 77 | 78 |\n| 79 | `many.py` |\n", False),
        ("Of tables:\n\n| 77 | 78 |\n| 12.8 | `many.py` |\n", True),
        ("```\n`many.py` 77\n```\n", True),
        ("In `planning/many.py`, 77.", True),
    ],
)
def test_a_sentence_elsewhere_that_is_not_measured_is_found(claim: str, is_true: bool) -> None:
    assert (wrong((block, names) for block, names in sentences_that_claim(claim) if names) == []) is is_true

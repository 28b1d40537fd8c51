"""Tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from edge_run.cli.shared.printable import one_line


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of as many cells each as lines; the first column is aligned to the left, the others to the right."""
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]

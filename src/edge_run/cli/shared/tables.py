"""Tables of plain text."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from edge_run.cli.shared.printable import one_line

LEAST_REASON_COLUMNS = 24


def align(rows: Sequence[Sequence[str]], first: Callable[[str, int], str] = str.ljust) -> list[str]:
    """Return rows of as many cells each as lines; all columns but the first are aligned to the right.

    first: how the first one is, `str.ljust` or `str.rjust`.
    """
    rows = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([first(row[0], widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def with_reasons(rows: Sequence[tuple[str, str, str]], columns: int | None) -> list[str]:
    """Return rows of a name, a value and a reason as lines.

    Reasons are wrapped at `columns` (None: as if there were plenty), and left out where there is no room.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, value, reason in rows:
        start = f"   {name:{widths[0]}} {value:>{widths[1]}}"
        room = (columns or 1000) - len(start) - 2
        reasons = textwrap.wrap(reason, room) if room >= LEAST_REASON_COLUMNS else [""]
        lines.append(f"{start}  {reasons[0]}".rstrip() if room > 0 else f"{name} {value}")
        lines.extend(" " * (len(start) + 2) + more for more in reasons[1:])
    return lines

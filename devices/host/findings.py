"""What an examination finds: frozen dataclasses, whose field names are the keys of `edge-run doctor --json`."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found about `topic`, in one line, and what to do about it, often a command.

    state: `ok`; `note`, which is slower or less than it could be; `problem`, which keeps models from running as they
    should.
    """

    topic: str
    state: str
    finding: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order in which they are worth reading."""

    findings: tuple[Finding, ...]

    @property
    def problems(self) -> int:
        """How many of them are problems."""
        return sum(finding.state == PROBLEM for finding in self.findings)

    @property
    def notes(self) -> int:
        """How many of them are notes."""
        return sum(finding.state == NOTE for finding in self.findings)

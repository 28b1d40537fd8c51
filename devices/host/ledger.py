"""A ledger of granted budgets, one for each user: runs that together exceed memory are refused, not killed later.

A run knows how much memory it takes when its plan is made, but the system shows that memory as used only after the
weights are read. Until then the budget is written down here, in a file that counts as long as its process lives
(`locks.py`). Where such files cannot be kept, other runs are not known, and no run fails for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import BudgetError, option
from edge_run.base.files.texts import as_text
from edge_run.base.process_ids import pid_namespace
from edge_run.base.strict_json import LARGEST, parse
from edge_run.base.units import MIB, format_size
from edge_run.devices.host.locks import LivingFile, locked, own_folders, read_living, user_folders
from edge_run.devices.host.memory import available_bytes, memory_groups, process_memory

logger = logging.getLogger(__name__)

MOST_NAMED = 3
_PREFIX = "run-"
_LARGEST_PID = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """A live process with grants: the models they are for, what they allow it in all, and what it holds now.

    held_bytes: without pages of files. A model that begins in the page cache has still to be copied.
    """

    pid: int
    models: tuple[str, ...]
    granted_bytes: int
    held_bytes: int

    @property
    def rest_bytes(self) -> int:
        """What it may still take."""
        return max(0, self.granted_bytes - self.held_bytes)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A grant as it is written down: what it adds to a process that holds base_bytes besides all its grants."""

    pid: int
    namespace: int
    model: str
    base_bytes: int
    added_bytes: int

    def __post_init__(self) -> None:
        """Raise ValueError where this is no grant that was written down here."""
        numbers = (self.pid, self.namespace, self.base_bytes, self.added_bytes)
        if not isinstance(self.model, str) or any(type(one) is not int or abs(one) >= LARGEST for one in numbers):
            raise ValueError("a grant of other fields")
        if not 0 < self.pid <= _LARGEST_PID:
            raise ValueError(f"a grant of process {self.pid}")


class Ledger:
    """The ledger in `folder`, by default the user's. Thread-safe; any number in a process are one and the same.

    available_bytes: what this process may hold in all, as in `memory.py`.
    """

    def __init__(self, folder: Path | None = None, available_bytes: Callable[..., int] = available_bytes) -> None:
        self._folder, self._available_bytes = folder, available_bytes

    @property
    def folders(self) -> list[Path]:
        """Where grants are now: written to the first, and read from all, as another process may have had no other.

        They are looked for anew each time, as a session that begins has one more. Empty where no ledger can be kept.
        """
        return own_folders([self._folder] if self._folder else user_folders())

    def runs(self) -> list[Run]:
        """Return the live processes with grants, this one among them."""
        with self._locked() as folders:
            return _runs(_entries(folders))

    def promised_bytes(self, group: Path | None = None) -> int:
        """Return what live grants may still take: those of all processes, or of those in a memory cgroup's folder.

        Of each process it is what was granted, less what it holds now.
        """
        return _promised(self.runs(), group)

    def grant(self, needed_bytes: int, model: str, held_bytes: int | None = None) -> contextlib.ExitStack:
        """Promise this process `needed_bytes` in all, for `model`. Raises BudgetError when that is not free.

        held_bytes: the part of needed_bytes that the process held already when it was measured; None: what it holds
        now, pages of files aside. An earlier model's weights may be in it, as far as they were read by then. So a grant
        adds needed_bytes - held_bytes to what the process may come to hold, which is at least held_bytes and at least
        what was granted before: nothing is counted twice, and what the earlier model has still to read is not
        forgotten.

        Of two processes that ask at once, one is first. A grant that cannot be written down is given all the same.
        It lasts until what is returned is closed, which may be done twice, or the process ends; in a forked child, to
        which nothing was granted, closing does nothing.
        """
        with self._locked() as folders:
            return _write(folders, self._entry(folders, needed_bytes, model, held_bytes))

    def check(self, least_bytes: int, model: str) -> None:
        """Raise BudgetError where not even `least_bytes` in all are free for this process, the least for `model`."""
        with self._locked() as folders:
            self._entry(folders, least_bytes, model, is_least=True)

    @property
    def free_bytes(self) -> int:
        """What this process may hold in all; negative where more than there is was promised."""
        return self._available_bytes(promised_bytes=self.promised_bytes)

    def _entry(
        self,
        folders: list[Path],
        needed_bytes: int,
        model: str,
        held_bytes: int | None = None,
        *,
        is_least: bool = False,
    ) -> _Entry:
        """Return a grant to be written down, as `grant` says. The ledger is locked. Raises BudgetError."""
        entries = _entries(folders)
        own, others = _own(entries), [run for run in _runs(entries) if run.pid != os.getpid()]
        held_bytes = process_memory().held_bytes if held_bytes is None else held_bytes
        base_bytes = max(held_bytes - _added(own), *(entry.base_bytes for entry in own), 0)
        unread_bytes = base_bytes + _added(own) - held_bytes
        free_bytes = self._available_bytes(promised_bytes=lambda group: unread_bytes + _promised(others, group))
        if needed_bytes > free_bytes:
            raise _refusal(needed_bytes, free_bytes, model, others, own, is_least=is_least)
        return _Entry(os.getpid(), pid_namespace(), as_text(model), base_bytes, needed_bytes - held_bytes)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[list[Path]]:
        """Hold the ledger's lock in this block, and give its folders."""
        folders = self.folders
        with contextlib.ExitStack() as locks:
            for folder in folders:  # in the same order in every process
                locks.enter_context(locked(folder / "lock"))
            yield folders


def _write(folders: list[Path], entry: _Entry) -> contextlib.ExitStack:
    grant = contextlib.ExitStack()
    try:
        if folders:
            file = LivingFile(folders[0], _PREFIX, json.dumps(dataclasses.asdict(entry)).encode())
            grant.callback(file.remove)
    except OSError as error:
        logger.info("a grant cannot be written down in %s: %s", folders[0], error)
    return grant


def _entries(folders: list[Path]) -> list[_Entry]:
    """Return the grants of live processes that we can see. The ledger is locked."""
    entries = []
    for content in (content for folder in folders for content in read_living(folder, _PREFIX)):
        with contextlib.suppress(ValueError, TypeError):  # another version's
            entries.append(_Entry(**parse(content)))
    return [entry for entry in entries if entry.namespace == pid_namespace()]


def _own(entries: Iterable[_Entry]) -> list[_Entry]:
    return [entry for entry in entries if entry.pid == os.getpid()]


def _added(entries: Iterable[_Entry]) -> int:
    return sum(entry.added_bytes for entry in entries)


def _runs(entries: Iterable[_Entry]) -> list[Run]:
    by_process: dict[int, list[_Entry]] = {}
    for entry in entries:
        by_process.setdefault(entry.pid, []).append(entry)
    if not by_process:
        return []
    import psutil  # which takes long to load

    runs = []
    for pid, own in by_process.items():
        with contextlib.suppress(psutil.Error, OSError):
            held_bytes = process_memory(pid).held_bytes
            granted_bytes = max(entry.base_bytes for entry in own) + _added(own)
            runs.append(Run(pid, tuple(entry.model for entry in own), granted_bytes, held_bytes))
    return runs


def _promised(runs: Iterable[Run], group: Path | None) -> int:
    return sum(
        run.rest_bytes
        for run in runs
        if group is None or any(group == inside.folder for inside in memory_groups(run.pid))
    )


def _refusal(
    needed_bytes: int, free_bytes: int, model: str, others: list[Run], own: list[_Entry], *, is_least: bool = False
) -> BudgetError:
    """Return the error for a budget that is not there: who has it, and what to do.

    is_least: less would not do.
    """
    found_bytes = max(0, free_bytes)
    largest = sorted(others, key=lambda run: run.granted_bytes, reverse=True)
    named = [
        f"{format_size(run.granted_bytes)} to process {run.pid} ({', '.join(run.models)})"
        for run in largest[:MOST_NAMED]
    ]
    if more := largest[MOST_NAMED:]:
        named.append(f"{format_size(sum(run.granted_bytes for run in more))} to {len(more)} more")
    if own:
        named.append(f"{format_size(_added(own))} to this process ({', '.join(entry.model for entry in own)})")
    promised = f"; granted are {', '.join(named)}" if named else ""
    advice = "end another run" if others else "close the other model" if own else "end other programs"
    if found_bytes >= MIB and not is_least:
        advice = f"lower {option('memory')} to at most {found_bytes // MIB}MiB, or {advice}"
    return BudgetError(
        f"{model}: {'it needs at least' if is_least else 'the plan needs'} {format_size(needed_bytes)} of memory for "
        f"the whole process, and {format_size(found_bytes)} is free for it{promised}; {advice}",
        needed_bytes=needed_bytes,
        minimum_bytes=needed_bytes if is_least else 0,
        found_bytes=found_bytes,
    )

"""The batches of a run that were begun and are not finished, in their order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from edge_run.base.protocols import Logits
from edge_run.runtime.mesh.device_group import DeviceGroup
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Command, Decode, Operate
from edge_run.runtime.mesh.rates import MeshRates


@dataclass(eq=False, slots=True)
class _Begun:
    """A batch.

    command: the batch.
    rows: its logits, where it was computed at once.
    began_s: when it was begun, for the first time or again.
    took_s: what it took, where it was computed at once.
    spent: for how long each device computed in it then.
    """

    command: Decode
    rows: Logits | None = None
    began_s: float = 0.0
    took_s: float = 0.0
    spent: Mapping[str, float] = field(default_factory=dict)


class BatchesInFlight:
    """Has a group of devices compute batches, and remembers which are to be begun again. Not thread-safe.

    Under a plan by which devices take turns a batch is computed when it is begun, and its rows are kept. What its
    methods raise is for `MeshRun.recover`, unless it is said.

    log: what was decoded.
    rates: what it took.
    group: the devices of the plan in force.
    most: how many may be in flight. It is the same for other groups of devices, unless nothing was decoded before them,
        as tokens depend on who shares a pass.
    """

    def __init__(self, log: MeshLog, rates: MeshRates, group: DeviceGroup) -> None:
        self.log, self.rates, self.group, self.most = log, rates, group, 1
        self._begun: deque[_Begun] = deque()
        self._n_again = 0  # of the passes that the group has in flight, those that were finished under an earlier plan

    def use(self, group: DeviceGroup) -> None:
        """Have another group of devices compute what follows. Raises nothing."""
        self.group, self._n_again = group, 0
        if not len(self.log):
            self.most = group.most_in_flight

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def may_group(self) -> bool:
        """Whether plans with several passes in flight are of use: not while answers go on that share all passes."""
        return self.most > 1 or not len(self.log)

    def begin(self, command: Decode) -> None:
        """Begin a batch; whatever this raises, it is in flight until `forget`."""
        begun = _Begun(command)
        self._begun.append(begun)
        self.log.add(begun.command, None)
        self._begin(begun)

    def finish(self) -> Logits:
        """Return the logits of the batch that was begun first; whatever this raises, it is in flight then."""
        begun = self._begun[0]
        is_done = begun.rows is not None
        rows = self.group.finish(self.rates.token_s) if begun.rows is None else begun.rows
        self._begun.popleft()
        now_s = time.monotonic()
        seconds = begun.took_s if is_done else now_s - begun.began_s
        self.log.finished(begun.command, seconds)
        if self.group.is_split:
            self.rates.note_shared(len(rows), now_s)
        else:
            self.rates.note(len(begun.command.batch), seconds, begun.spent, self.group.hops)
        return rows

    def forget(self, command: Decode) -> None:
        """A batch is not in flight, whether or not it ever was, and was not computed. Raises nothing."""
        self._begun = deque(one for one in self._begun if one.command is not command)
        self.log.forget(command)

    def forget_all(self) -> None:
        """No batch is in flight any more; devices may have computed some of them. Raises nothing."""
        while self._begun:
            self.forget(self._begun[-1].command)
        self.give_up()

    def give_up(self) -> None:
        """The group of devices has no pass in flight any more; batches are to be begun again. Raises nothing."""
        self.group.give_up()
        self._n_again = 0

    def perform(self, command: Command) -> None:
        """Have a command of the log carried out again; a batch in flight is only begun again."""
        begun = next((one for one in self._begun if one.command is command), None)
        if begun is not None:
            self._begin(begun, is_again=True)
        elif self.group.is_split and isinstance(command, Decode):
            self._finish_again(self.group.most_in_flight - 1)
            self.group.begin(command, is_again=True)
            self._n_again += 1
        else:
            if isinstance(command, Operate) and command.what == "learn":  # all begins anew after that
                self.give_up()
            self.group.perform(command, self.rates.token_s, is_again=True)

    def _finish_again(self, n_left: int) -> None:
        """Wait for passes that were finished under an earlier plan, until so many are in flight."""
        while self._n_again > n_left:
            self.group.finish(self.rates.token_s, wants_rows=False)
            self._n_again -= 1

    def _begin(self, begun: _Begun, *, is_again: bool = False) -> None:
        """Have a batch computed, up to its tail where that is split off."""
        begun.rows, begun.began_s = None, time.monotonic()
        if self.group.is_split:
            self._finish_again(0)
            self.group.begin(begun.command, is_again=is_again)
            return
        rows = self.group.perform(begun.command, self.rates.token_s, is_again=is_again)
        begun.took_s, begun.spent = time.monotonic() - begun.began_s, self.group.spent
        assert rows is not None, "a batch has logits, or none of its tokens wants any"
        begun.rows = rows if self.most == 1 else rows.copy()  # others may be computed before it is finished

"""The devices that compute under one plan: told what to do, each in its part, and waited for."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edge_run.base.errors import DeviceLost, EdgeRunError, MeshError
from edge_run.base.fields import Document
from edge_run.base.mesh import Mesh
from edge_run.base.protocols import BatchToken, Logits
from edge_run.partition.mesh_plan import MeshPlan
from edge_run.runtime.mesh.activation_coding import ActivationCoder
from edge_run.runtime.mesh.commands import carry_out
from edge_run.runtime.mesh.messages import Command, Decode, command_header, command_parts
from edge_run.runtime.mesh.offers import most_waiting_bytes
from edge_run.runtime.mesh.run_events import LeaseLost, RunEvents
from edge_run.runtime.mesh.transport import SEND_TIMEOUT_S, LinkTransport, PassFailed
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import NotNumbers, Share

logger = logging.getLogger(__name__)

LEAST_DEADLINE_S = 10.0
PATIENCE = 20.0  # times what a pass is expected to take
READING_PATIENCE = 5.0  # times what devices are expected to read for, in their first passes
MOST_READING_S = 3600.0  # of patience for that: how fast its drive is, a device says itself


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan that devices try to compute by.

    plan: which device computes which units.
    epoch: later than that of every attempt before.
    lease: the epoch of the lease under which the plan was made.
    reading_s: how long the first passes wait for weights that stay, in all.
    """

    plan: MeshPlan
    epoch: int
    lease: int
    reading_s: float


class DeviceGroup:
    """The devices of one attempt; the commands to them are numbered. Not thread-safe.

    Under a plan with several passes in flight, a pass ends here after the units that this device has at its beginning;
    its tail is another one, when the activation has been around. Between the two, others are begun.

    attempt: what they try to compute by.
    others: the devices of its plan besides this one.
    number: that of the latest command.
    """

    def __init__(
        self,
        mesh: Mesh,
        engine: SliceEngine,
        events: RunEvents,
        attempt: Attempt,
        coder: ActivationCoder,
    ) -> None:
        """coder: of what this device hands on."""
        self._mesh, self._engine, self._events, self.attempt = mesh, engine, events, attempt
        # What passes may still take besides.
        self._reading_s = min(MOST_READING_S, READING_PATIENCE * attempt.reading_s)
        self.others = [node for node in attempt.plan.nodes if node != mesh.node]
        self.number = 0
        self._in_flight: deque[tuple[int, Decode]] = deque()  # with their numbers
        self._latest: Sequence[BatchToken] = ()
        self._told: Command | None = None  # the latest command, as far as the others were told of it
        self._loss: DeviceLost | None = None  # of a device that was not told something
        self._share = Share(attempt.plan.owners, mesh.node, self.is_split)
        room_bytes = most_waiting_bytes(engine)
        self._transport = LinkTransport(mesh.link, attempt.epoch, self._share, coder, self._check, room_bytes)

    @property
    def most_in_flight(self) -> int:
        """How many passes in flight are of use."""
        return self.attempt.plan.most_in_flight

    @property
    def is_split(self) -> bool:
        """Whether the tail of a pass is computed apart, so that several can be in flight."""
        return self.most_in_flight > 1

    @property
    def spent(self) -> dict[str, float]:
        """For how long each device computed in the latest pass, in seconds."""
        return self._transport.spent

    @property
    def hops(self) -> int:
        """How often an activation is handed on in a pass."""
        return self._transport.hops

    def assign(self) -> None:
        """Have this device compute its part from now on. Raises BudgetError where it does not fit."""
        self._transport.forget()
        self._engine.assign(self._share, self._transport)

    def perform(self, command: Command, token_s: float, *, is_again: bool = False) -> Logits | None:
        """Have all devices carry out `command`, this one too; return the logits of a batch.

        token_s: what a token took lately, 0 where that is not known.
        is_again: as of `command_header`.
        """
        self._latest = command.batch if isinstance(command, Decode) else ()
        self.tell(command, is_again=is_again)
        n_tokens = len(command.batch) if isinstance(command, Decode) else 0
        deadline_s = self._deadline_s(n_tokens, token_s) if n_tokens and self.others else None
        self._transport.expect(self.number, deadline_s, self._oldest)
        if self.others:
            self._transport.hear()  # what is said late of a pass that is over is nothing to this one
        if not isinstance(command, Decode):
            carry_out(self._engine, command)
            return None
        with self._reading():
            rows = self._engine.decoder.decode(command.batch)
        self._transport.finish()
        self._check_rows(rows)
        return rows

    def begin(self, command: Decode, *, is_again: bool = False) -> None:
        """Have all devices carry out `command`, but its tail, which `finish` computes; only where that `is_split`."""
        self._latest = command.batch
        self.tell(command, is_again=is_again)
        self._transport.expect(self.number, oldest=self._oldest)
        self._transport.hear()
        self._engine.decoder.follow(command.batch)
        self._transport.finish()
        self._in_flight.append((self.number, command))

    def finish(self, token_s: float, *, wants_rows: bool = True) -> Logits:
        """Return the logits of the pass that was begun first, of those in flight; none unless it `wants_rows`.

        token_s: as of `perform`.
        """
        self._check_told()
        number, command = self._in_flight[0]
        tokens = sum(len(waiting.batch) for _, waiting in self._in_flight)
        self._transport.expect(number, self._deadline_s(tokens, token_s))
        self._latest = [token for token in command.batch if token.wants_logits and wants_rows]
        with self._reading():
            if self._latest:
                rows = self._engine.tail_rows(len(self._latest))
            else:
                rows = np.empty((0, self._engine.decoder.capabilities.vocabulary), np.float32)
                self._transport.await_tail()
        self._transport.finish()
        self._check_rows(rows)
        self._in_flight.popleft()
        return rows

    def give_up(self) -> None:
        """Forget the passes in flight; the next command tells the other devices that these are over."""
        self._in_flight.clear()

    def batch_of(self, error: EdgeRunError) -> Sequence[BatchToken]:
        """Return the tokens of the pass that `error` is about."""
        number = error.number if isinstance(error, PassFailed) else None
        return next((command.batch for one, command in self._in_flight if one == number), self._latest)

    @property
    def _oldest(self) -> int:
        return self._in_flight[0][0] if self._in_flight else self.number

    def _check_rows(self, rows: Logits) -> None:
        if self.others and len(rows) and not np.isfinite(rows.max(axis=1)).all():
            raise NotNumbers("the last layers gave logits that are no numbers", node=self._mesh.node, after=self._last)

    def tell(self, command: Command, *, is_again: bool = False) -> None:
        """Have the other devices carry out `command`. Raises DeviceLost, and from then on for each command."""
        self._check_told()
        self.number += 1
        self._told = command
        header = command_header(command, self.attempt.epoch, self.number, self._oldest, is_again=is_again)
        parts = command_parts(command)
        try:
            for node in self.others:
                self._send(node, header, parts)
        except DeviceLost as error:
            self._loss = error
            raise

    def stop(self, command: Command) -> None:
        """Have the other devices take back `command`, the latest; those that it was never told take back nothing.

        A device that is lost meanwhile is found out later.
        """
        if self._told is not command:
            return
        header: Document = {"kind": "stop", "epoch": self.attempt.epoch, "number": self.number}
        for node in self.others:
            try:
                self._send(node, header)
            except DeviceLost as error:
                logger.info("%s", error)

    def _send(self, node: str, header: Document, parts: Sequence[memoryview] = ()) -> None:
        """Raises DeviceLost; LeaseLost where the link itself has ended, so that this device commands nobody."""
        try:
            self._mesh.link.send(node, header, parts, timeout_s=SEND_TIMEOUT_S)
        except DeviceLost:
            raise
        except MeshError as error:
            raise LeaseLost(error.message) from error

    def _check_told(self) -> None:
        """Raise DeviceLost where a device has missed a command: it would compute something else."""
        if self._loss is not None:
            raise self._loss

    @property
    def _last(self) -> str:
        """The last of the other devices to compute in a pass, an empty string where there is none."""
        return next((node for node in reversed(self.attempt.plan.owners) if node != self._mesh.node), "")

    def _deadline_s(self, n_tokens: int, token_s: float) -> float:
        """Return what a pass may take before a device must be stuck."""
        slowest_s = max(self.attempt.plan.token_s, token_s)
        least_s = max(LEAST_DEADLINE_S, PATIENCE * (slowest_s + 0.1 * n_tokens * slowest_s))
        return least_s + max(0.0, self._reading_s)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Count what is done in this block as time in which devices could read."""
        started_s = time.monotonic()
        yield
        self._reading_s -= time.monotonic() - started_s

    def _check(self) -> None:
        """While an activation is waited for: was the pass stopped, is a device of the plan gone, does another lead?"""
        self._engine.interrupt.check()
        self._events.check(self.others, self.attempt.lease)

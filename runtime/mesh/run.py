"""A run over a mesh: its devices opened, told what to do, and done without when they are lost.

What to do when is decided in `failover.py`; here it is done. What was decoded is recorded, so that under a new
plan all caches can be emptied and the recorded batches run again, in their recorded widths.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from edge_run.base.errors import (
    BudgetError,
    DeviceLost,
    EdgeRunError,
    KernelError,
    MeshError,
    NotSupported,
    ProtocolError,
)
from edge_run.base.mesh import Lost, Mesh, MeshEvent, Unled, is_worker, names_apart
from edge_run.base.protocols import BatchToken, Logits
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import GraphChanged, PassShape
from edge_run.runtime.mesh.activation_coding import ActivationCoder, SentActivations
from edge_run.runtime.mesh.commands import carry_out
from edge_run.runtime.mesh.coordinator import Failed, LayerCoordinator
from edge_run.runtime.mesh.failover import (
    Deposed,
    Ended,
    Event,
    Failover,
    GaveUp,
    Gone,
    Instruction,
    Lead,
    Led,
    MakePlan,
    NotLed,
    Open,
    Opened,
    Phase,
    Planned,
    Refused,
    Replayed,
    ReplayLog,
    TellUser,
    Unfit,
)
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Command, Decode, Operate, command_header, command_parts
from edge_run.runtime.mesh.offers import most_waiting_bytes
from edge_run.runtime.mesh.rates import PAYS_BACK_TOKENS, MeshRates
from edge_run.runtime.mesh.recovery_time import PlanTimes, replay_s
from edge_run.runtime.mesh.transport import (
    GRAPH_CHANGED,
    SEND_TIMEOUT_S,
    LinkTransport,
    Overdue,
    PassFailed,
    RunEnded,
    Unreached,
)
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import NotNumbers, Share

logger = logging.getLogger(__name__)

LEAD_TIMEOUT_S = 10.0
LEAST_DEADLINE_S = 10.0
FAULTS = (DeviceLost, PassFailed, ProtocolError, NotNumbers)  # which another device may be left out for
LED_BY_ANOTHER = "another device leads the mesh now"
PATIENCE = 20.0  # times what a pass is expected to take


class LeaseLost(DeviceLost):
    """Another coordinator leads."""


class MeshRun:
    """The devices of a run, and what they were told. Not thread-safe. say is told what the user should see."""

    def __init__(self, mesh: Mesh, engine: SliceEngine, spread: LayerCoordinator, say: Callable[[str], None]) -> None:
        """Spread the model over who is there, at once. Raises BudgetError where it does not fit all together."""
        self._mesh, self._engine, self._coordinator, self._say = mesh, engine, spread, say
        self._local: LocalDecoder = engine.decoder
        self._log = MeshLog()
        self._rates = MeshRates()
        self._transport = LinkTransport(mesh.link, 0, (mesh.node,), mesh.node)
        self._number = self._lease = 0
        self._sent = SentActivations()
        self._reported_s = 0.0
        self._before = self._pace = PlanTimes()
        self._learned: set[PassShape] = set()
        self._heard: list[MeshEvent] = []
        self._incarnations: dict[str, str] = {}  # the incarnations of devices that were asked
        self._tellers: set[str] = set()  # who has said of another device that it did wrong
        members = mesh.members()
        self._members = {member.node: member for member in members}
        self._failover = Failover(mesh.node, [member.node for member in members if is_worker(member)])
        try:
            self._drive(self._failover.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let the other devices go, and the lease. Idempotent."""
        self._failover.handle(Ended())
        try:
            self._coordinator.release()
        except MeshError as error:
            logger.info("%s", error)
        finally:
            if self._lease:
                with contextlib.suppress(MeshError):  # it ends soon
                    self._mesh.resign()

    @property
    def _others(self) -> list[str]:
        return [node for node in self._failover.nodes if node != self._mesh.node]

    @property
    def _last(self) -> str:
        """The last of the other devices to compute in a pass, an empty string where there is none."""
        plan = self._coordinator.plan
        return next((node for node in reversed(plan.owners if plan else ()) if node != self._mesh.node), "")

    def _tell_all(self, command: Command) -> Logits | None:
        """Have all devices carry out `command`, this one too; return the logits of a batch."""
        if self._others:
            self._transport.hear()
        self._number += 1
        self._send(command)
        n_tokens = len(command.batch) if isinstance(command, Decode) else 0
        self._transport.expect(self._number, self._deadline_s(n_tokens) if n_tokens and self._others else None)
        if not isinstance(command, Decode):
            carry_out(self._engine, command)
            return None
        rows = self._local.decode(command.batch)
        self._transport.finish()
        if self._others and len(rows) and not np.isfinite(rows.max(axis=1)).all():
            raise NotNumbers("the last layers gave logits that are no numbers", node=self._mesh.node, after=self._last)
        return rows

    def _send(self, command: Command) -> None:
        header, parts = command_header(command, self._failover.epoch, self._number), command_parts(command)
        for node in self._others:
            self._mesh.link.send(node, header, parts, timeout_s=SEND_TIMEOUT_S)

    def _deadline_s(self, n_tokens: int) -> float:
        """Return what a pass may take before somebody must be stuck."""
        plan = self._coordinator.plan
        token_s = max(plan.token_s if plan else 0.0, self._rates.token_s)
        return max(LEAST_DEADLINE_S, PATIENCE * (token_s + 0.1 * n_tokens * token_s))

    def _check(self) -> None:
        """While an activation is waited for: was the pass stopped, is a device of the plan gone, does another lead?"""
        self._engine.interrupt.check()
        events = self._mesh.wait(timeout_s=0.0)
        for i, event in enumerate(events):
            if isinstance(event, Lost) and event.node in self._others:
                self._heard += events[i + 1 :]  # whoever was started anew is there again
                raise DeviceLost(event.why, node=event.node)
            if self._is_end_of_lease(event):
                self._heard += events[i + 1 :]
                raise LeaseLost(LED_BY_ANOTHER)
            self._heard.append(event)

    def _is_end_of_lease(self, event: MeshEvent) -> bool:
        """Return whether a lease has ended that this run needs: who goes on alone needs none."""
        is_alone = self._failover.nodes == (self._mesh.node,)
        return isinstance(event, Unled) and event.epoch >= self._lease and not is_alone

    def _deposed(self) -> Deposed | None:
        """Return that another coordinator leads, where that was heard meanwhile."""
        self._heard += self._mesh.wait(timeout_s=0.0)
        ends = [event for event in self._heard if self._is_end_of_lease(event)]
        self._heard = [event for event in self._heard if event not in ends]
        return Deposed(LED_BY_ANOTHER) if ends else None

    def _recover(self, error: EdgeRunError, batch: Sequence[BatchToken]) -> None:
        """Make it possible to go on after `error`, or raise it."""
        logger.info("epoch %d, command %d: %s", self._failover.epoch, self._number, error)
        shape = self._unknown_shape(error, batch)
        if shape is not None:
            self._learn(shape, error)
            return
        self._drive(self._failover.handle(self._event(error)))

    def _unknown_shape(self, error: EdgeRunError, batch: Sequence[BatchToken]) -> PassShape | None:
        """Return the shape of a pass whose graph has to be learnt, which is what `error` says; else None."""
        is_told = isinstance(error, PassFailed) and error.code == GRAPH_CHANGED
        if not isinstance(error, GraphChanged) and not is_told:
            return None
        return self._engine.maps.unknown_shape(batch)

    def _learn(self, shape: PassShape, error: EdgeRunError) -> None:
        if shape in self._learned and isinstance(error, PassFailed):
            self._drive(self._failover.handle(self._event(error)))
            return
        if shape in self._learned:
            raise NotSupported(f"this model cannot be spread over devices: {error}; run it without --mesh") from error
        self._learned.add(shape)
        self._say_if_long()
        try:
            self._tell_all(Operate("learn", shape))
            for command in self._log:
                self._tell_all(command)
        except FAULTS as found:
            self._drive(self._failover.handle(self._event(found)))

    def _say_if_long(self) -> None:
        if self._log.tokens:
            self._say(f"a pass of a new kind: {self._log.tokens} tokens are computed again")

    def _event(self, error: EdgeRunError) -> Event:
        """Return what `error` means for the run. Raises it where it is this device's own."""
        node = error.node if isinstance(error, FAULTS) else ""
        if isinstance(error, LeaseLost):
            return Deposed(error.message)
        if isinstance(error, Overdue):
            return self._coordinator.who_is_stuck(self._others)
        if isinstance(error, RunEnded):
            return GaveUp(node, error.message)
        if isinstance(error, NotNumbers):
            return self._event_of_nan(error)
        teller = error.teller if isinstance(error, PassFailed | Unreached) else ""
        if isinstance(error, PassFailed) and teller:
            if teller in self._tellers:
                return Refused(teller, f"it blames one device after another; the last time {error}")
            self._tellers.add(teller)
        if isinstance(error, PassFailed | ProtocolError):
            return Refused(node or (self._others or [""])[0], error.message, teller)
        if isinstance(error, DeviceLost) and node:
            return Gone(node, error.message, teller)
        raise error

    def _event_of_nan(self, error: NotNumbers) -> Event:
        """Return who is to blame for what is no number here. Raises KernelError where nobody else can be."""
        node = error.after if error.node == self._mesh.node else error.node
        if not node:
            raise KernelError(
                f"{error}: the weights or the computation are damaged; copy or download the model again"
            ) from error
        return Refused(node, f"{error}, after what it handed over")

    def _drive(self, instructions: Sequence[Instruction]) -> None:
        """Carry out instructions, and what follows from each, until there are none."""
        waiting = list(instructions)
        while waiting:
            event = self._execute(waiting.pop(0))
            if event is None:
                continue
            waiting = self._failover.handle(event) or waiting
        if self._failover.phase is not Phase.RUNNING:
            raise MeshError(
                f"the mesh does not get on: it waits for {self._failover.phase.value}; `edge-run mesh doctor` says "
                "what is in the way, without --mesh the model runs here"
            )

    def _execute(self, instruction: Instruction) -> Event | None:
        """Carry out one instruction; return what came of it."""
        try:
            if isinstance(instruction, TellUser):
                self._tell(instruction)
            elif isinstance(instruction, Lead):
                return self._lead()
            elif isinstance(instruction, MakePlan):
                self._incarnations |= {
                    m.node: m.incarnation for m in self._mesh.members() if m.node in instruction.candidates
                }
                self._coordinator.prepare(instruction.candidates)
                midway = (PAYS_BACK_TOKENS,) if self._log.tokens else ()
                return Planned(self._coordinator.make_plan(*midway).nodes)
            elif isinstance(instruction, Open):
                return self._open(instruction)
            elif isinstance(instruction, ReplayLog):
                return self._replay(instruction.epoch)
        except Failed as failed:
            return self._deposed() or failed.event  # who does not obey has nothing against this run
        except FAULTS as error:
            return self._event(error)
        return None

    def _lead(self) -> Event:
        try:
            lease = self._mesh.lead(timeout_s=LEAD_TIMEOUT_S)
        except MeshError as error:
            return NotLed(str(error))
        if lease != self._lease:
            self._coordinator.forget_others()  # another coordinator may have had them do something else in between
        self._lease = lease
        return Led(lease)

    def _open(self, instruction: Open) -> Event:
        plan = self._coordinator.plan
        if plan is None or set(plan.nodes) != set(instruction.nodes):
            plan = self._coordinator.alone()
        node = self._mesh.node
        coder = ActivationCoder(
            self._engine.config.mesh_activations, self._coordinator.links.speeds(node, plan.nodes), self._sent
        )
        room_bytes = most_waiting_bytes(self._engine)
        self._transport = LinkTransport(
            self._mesh.link, instruction.epoch, plan.owners, node, coder, self._check, most_waiting_bytes=room_bytes
        )
        self._number = 0
        self._learned.clear()
        self._coordinator.open(plan, instruction.epoch)
        self._transport.forget()
        try:
            self._engine.assign(Share(plan.owners, node), self._transport)
        except BudgetError as error:
            if len(plan.nodes) == 1:
                raise
            self._coordinator.take_less(error)
            return Unfit(str(error))
        if self._rates.token_s:
            self._before = replace(self._pace, token_s=self._rates.token_s)
        self._pace = PlanTimes(0.0, plan.token_s, self._coordinator.reading_s(plan))
        self._rates.restart()
        if len(plan.nodes) > 1:
            self._mesh.publish_plan(self._lease, self._coordinator.plan_document())
            self._say(self._coordinator.plan_text())
        return Opened(instruction.epoch)

    def _replay(self, epoch: int) -> Event:
        if self._log.tokens:
            again = f"{self._log.tokens} tokens are computed again on {len(self._failover.nodes)} devices"
            self._say(f"{again}, about {replay_s(self._log, self._before, self._pace):.1f} s")
        for command in self._log:
            try:
                self._tell_all(command)
            except (GraphChanged, PassFailed) as error:
                batch = command.batch if isinstance(command, Decode) else ()
                shape = self._unknown_shape(error, batch)
                if shape is None or shape in self._learned:
                    raise
                self._learned.add(shape)
                self._tell_all(Operate("learn", shape))
                return self._replay(epoch)
        return Replayed(epoch)

    def _tell(self, told: TellUser) -> None:
        """Say it, with devices called what people call them."""
        names = names_apart(self._members.values())
        whose = f"{names.get(told.node, told.node)} " if told.node else ""
        by = f", says {names.get(told.teller, told.teller)}" if told.teller else ""
        self._say(f"{whose}{told.text}{by}")

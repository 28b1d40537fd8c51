"""A decoder over a mesh: the same to the generate loop as a local one, and it goes on when a device dies.

All devices run llama.cpp on the same batches; this one has the head and the tail, and its callback hands states on and
waits for them. What was decoded is recorded. When a device is lost, the rest take its layers under a new epoch, all
caches are emptied, and the recorded batches are run again in their recorded widths: so the text goes on as if nothing
had happened. What to do when is decided in `mesh_failover.py`; here it is done.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from edge_run.base.errors import (
    BudgetError,
    DeviceLost,
    EdgeRunError,
    MeshError,
    NotSupported,
    ProtocolError,
)
from edge_run.base.mesh import Document, Joined, Lost, Mesh, MeshEvent, Unled, is_worker
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.base.results import MeshUse
from edge_run.runtime.decoder import LocalDecoder
from edge_run.runtime.driver import GraphChanged, PassShape
from edge_run.runtime.mesh_failover import (
    Appeared,
    Better,
    Deposed,
    Event,
    Failover,
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
    Replay,
    Replayed,
    Tell,
    Unfit,
)
from edge_run.runtime.mesh_log import MeshLog
from edge_run.runtime.mesh_messages import Command, Decode, Operate, command_header, command_parts
from edge_run.runtime.mesh_rates import MeshRates
from edge_run.runtime.mesh_spread import Failed, Spread
from edge_run.runtime.mesh_wire import SEND_TIMEOUT_S, LinkWire, Overdue, PassFailed
from edge_run.runtime.slice import Share
from edge_run.runtime.slice_engine import SliceEngine
from edge_run.runtime.worker import carry_out

logger = logging.getLogger(__name__)

LEAD_TIMEOUT_S = 10.0
LEAST_DEADLINE_S = 10.0
LED_BY_ANOTHER = "another device leads the mesh now"
PATIENCE = 20.0  # times what a pass is expected to take


class LeaseLost(DeviceLost):
    """Another coordinator leads."""


class MeshDecoder:
    """The decoder of a coordinator. Not thread-safe but for `cancel`. say is told what the user should see."""

    def __init__(self, mesh: Mesh, engine: SliceEngine, spread: Spread, say: Callable[[str], None]) -> None:
        """Spread the model over who is there, at once. Raises BudgetError where it does not fit all together."""
        self._mesh, self._engine, self._spread, self._say = mesh, engine, spread, say
        self._local: LocalDecoder = engine.decoder
        self._log = MeshLog()
        self._rates = MeshRates()
        self._wire = LinkWire(mesh.link, 0, (mesh.node,))
        self._number = self._sent_bytes = self._lease = 0
        self._reported_s = 0.0
        self._learned: set[PassShape] = set()
        self._heard: list[MeshEvent] = []
        members = mesh.members()
        self._names = {member.node: member.name for member in members}
        self._failover = Failover(mesh.node, [member.node for member in members if is_worker(member)])
        self._drive(self._failover.start())

    @property
    def capabilities(self) -> Capabilities:
        """What this decoder can do."""
        return self._local.capabilities

    @property
    def use(self) -> MeshUse:
        """Who computes what, and what that took so far."""
        plan = self._spread.plan
        return MeshUse(
            epoch=self._failover.epoch,
            nodes=self._spread.describe(),
            rounds=plan.rounds if plan else 1,
            predicted_token_s=plan.token_s if plan else 0.0,
            token_s=self._rates.token_s,
            hop_s=self._rates.hop_s,
            sent_bytes=self._sent_bytes + self._wire.sent_bytes,
            recoveries=self._failover.recoveries,
            left_out=dict(self._failover.left_out),
        )

    def cancel(self) -> None:
        """Stop the pass in progress, from any thread; `decode` raises Cancelled."""
        self._local.cancel()

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        """Run a batch; see `Decoder.decode`. Devices that are lost meanwhile are done without."""
        self._look_around()
        while True:
            try:
                started = time.monotonic()
                rows = self._tell_all(Decode(tuple(batch)))
                assert rows is not None
            except (DeviceLost, PassFailed, GraphChanged, ProtocolError) as error:
                self._recover(error, batch)
                continue
            except BaseException:
                self._stop(batch)
                raise
            seconds = time.monotonic() - started
            self._log.add_batch(batch, seconds)
            self._rates.note(len(batch), seconds, self._wire.spent, self._wire.hops)
            self._report()
            return rows

    def rewind(self, sequence: int, position: int) -> int:
        """Forget `sequence` from `position` on; return where it ends now."""
        end = self._local.rewind(sequence, position)
        self._log.rewind(sequence, position, end)
        self._operate("rewind", (sequence, position))
        return end

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        """Let each of `branches` hold what `sequence` holds, and nothing else; nothing is copied."""
        self._local.branch(sequence, branches)
        self._log.add(Operate("branch", (sequence, *branches)))
        self._operate("branch", (sequence, *branches))

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        """Let `sequence` go on as `branch` does from `position` on, and empty all `branches`."""
        self._local.keep(sequence, position, branch, branches)
        numbers = (sequence, position, branch, *branches)
        self._log.add(Operate("keep", numbers))
        self._operate("keep", numbers)

    def close(self) -> None:
        """Let the other devices go. Idempotent."""
        others, self._failover.nodes = self._others, ()
        if others:
            self._spread.release(others)
        if self._lease:
            try:
                self._mesh.resign()
            except MeshError as error:
                logger.info("%s", error)

    @property
    def _others(self) -> list[str]:
        return [node for node in self._failover.nodes if node != self._mesh.node]

    def _report(self) -> None:
        """Let others see how fast it goes, once a second."""
        now = time.monotonic()
        if now - self._reported_s >= 1 and self._rates.token_s:
            self._reported_s = now
            self._mesh.report({"tokens_per_s": round(1 / self._rates.token_s, 3)})

    def _operate(self, what: str, numbers: tuple[int, ...]) -> None:
        """Tell the others to do what was done here, and logged."""
        self._number += 1
        try:
            self._send(Operate(what, numbers))
        except DeviceLost as error:
            self._recover(error, ())

    def _tell_all(self, command: Command) -> Logits | None:
        """Have all devices carry out `command`, this one too; return the logits of a batch."""
        if self._others:
            self._wire.hear()
        self._number += 1
        self._send(command)
        self._wire.expect(self._number)
        if not isinstance(command, Decode):
            carry_out(self._engine, command)
            return None
        self._wire.deadline_s = self._deadline_s(len(command.batch)) if self._others else None
        rows = self._local.decode(command.batch)
        self._wire.finish()
        return rows

    def _send(self, command: Command) -> None:
        header, parts = command_header(command, self._failover.epoch, self._number), command_parts(command)
        for node in self._others:
            self._mesh.link.send(node, header, parts, timeout_s=SEND_TIMEOUT_S)

    def _deadline_s(self, n_tokens: int) -> float:
        """Return what a pass may take before somebody must be stuck."""
        plan = self._spread.plan
        token_s = max(plan.token_s if plan else 0.0, self._rates.token_s)
        return max(LEAST_DEADLINE_S, PATIENCE * (token_s + 0.1 * n_tokens * token_s))

    def _stop(self, batch: Sequence[BatchToken]) -> None:
        """The batch was taken back here: have the others take it back too."""
        for sequence in {token.sequence for token in batch}:
            first = min(token.position for token in batch if token.sequence == sequence)
            self._log.rewind(sequence, first, first if self.capabilities.can_rewind else 0)
        header: Document = {"kind": "stop", "epoch": self._failover.epoch, "number": self._number}
        for node in self._others:
            try:
                self._mesh.link.send(node, header, timeout_s=SEND_TIMEOUT_S)
            except DeviceLost as error:
                logger.info("%s", error)  # the next batch will find out

    def _look_around(self) -> None:
        """Hear who came and who went; between conversations, a new device is given its part."""
        if self._failover.phase is not Phase.RUNNING:  # it was broken off, by Ctrl-C or an error
            self._drive(self._failover.start())
        gone: list[Event] = []
        heard, self._heard = [*self._heard, *self._mesh.wait(timeout_s=0.0)], []
        for event in heard:
            if isinstance(event, Joined):
                self._names[event.member.node] = event.member.name
                if is_worker(event.member):
                    self._failover.handle(Appeared(event.member.node))
            elif isinstance(event, Lost):
                gone.append(Gone(event.node, event.why))
            elif isinstance(event, Unled) and event.epoch >= self._lease:
                gone.append(Deposed(LED_BY_ANOTHER))
        for loss in gone:
            self._drive(self._failover.handle(loss))
        if self._failover.wants_more and not len(self._log):
            self._drive(self._failover.handle(Better("a device joined")))
        elif why := self._rates.why_replan(self._spread, self._log.tokens):
            self._drive(self._failover.handle(Better(why)))

    def _check(self) -> None:
        """While a state is waited for: was the pass stopped, is a device of the plan gone, does another lead?"""
        self._engine.check_cancelled()
        for event in self._mesh.wait(timeout_s=0.0):
            if isinstance(event, Lost) and event.node in self._others:
                raise DeviceLost(event.why, node=event.node)
            if isinstance(event, Unled) and event.epoch >= self._lease:
                raise LeaseLost(LED_BY_ANOTHER)
            self._heard.append(event)

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
        if not isinstance(error, GraphChanged) and error.figures.get("error") != GraphChanged.__name__:
            return None
        return self._engine.unknown_shape(batch)

    def _learn(self, shape: PassShape, error: EdgeRunError) -> None:
        if shape in self._learned:
            raise NotSupported(f"this model cannot be spread over devices: {error}; run it without --mesh") from error
        self._learned.add(shape)
        self._say_if_long()
        try:
            self._tell_all(Operate("learn", shape))
            for command in self._log:
                self._tell_all(command)
        except (DeviceLost, PassFailed, ProtocolError) as found:
            self._drive(self._failover.handle(self._event(found)))

    def _say_if_long(self) -> None:
        if self._log.tokens:
            self._say(f"a pass of a new kind: {self._log.tokens} tokens are computed again")

    def _event(self, error: EdgeRunError) -> Event:
        """Return what `error` means for the run. Raises it where it is this device's own."""
        node = str(error.figures.get("node", ""))
        if isinstance(error, LeaseLost):
            return Deposed(str(error))
        if isinstance(error, Overdue):
            return self._spread.who_is_stuck(self._others)
        if isinstance(error, PassFailed | ProtocolError):
            return Refused(node or (self._others or [""])[0], str(error))
        if isinstance(error, DeviceLost) and node:
            return Gone(node, str(error))
        raise error

    def _drive(self, instructions: Sequence[Instruction]) -> None:
        """Carry out instructions, and what follows from each, until there are none."""
        waiting = list(instructions)
        while waiting:
            event = self._execute(waiting.pop(0))
            if event is None:
                continue
            waiting = self._failover.handle(event) or waiting
        if self._failover.phase is not Phase.RUNNING:
            raise MeshError(f"the mesh does not get on: it waits for {self._failover.phase.value}")

    def _execute(self, instruction: Instruction) -> Event | None:
        """Carry out one instruction; return what came of it."""
        try:
            if isinstance(instruction, Tell):
                self._say(self._named(instruction.text))
            elif isinstance(instruction, Lead):
                return self._lead()
            elif isinstance(instruction, MakePlan):
                self._spread.prepare(instruction.candidates)
                return Planned(self._spread.make_plan().nodes)
            elif isinstance(instruction, Open):
                return self._open(instruction)
            elif isinstance(instruction, Replay):
                return self._replay(instruction.epoch)
        except Failed as failed:
            return failed.event
        except (DeviceLost, PassFailed, ProtocolError) as error:
            return self._event(error)
        return None

    def _lead(self) -> Event:
        try:
            self._lease = self._mesh.lead(timeout_s=LEAD_TIMEOUT_S)
            return Led(self._lease)
        except MeshError as error:
            return NotLed(str(error))

    def _open(self, instruction: Open) -> Event:
        plan = self._spread.plan
        if plan is None or set(plan.nodes) != set(instruction.nodes):
            plan = self._spread.alone()
        node = self._mesh.node
        self._sent_bytes += self._wire.sent_bytes
        self._wire = LinkWire(self._mesh.link, instruction.epoch, plan.owners)
        self._wire.node, self._wire.check = node, self._check
        self._number = 0
        self._learned.clear()
        self._spread.open(plan, instruction.epoch)
        try:
            self._engine.assign(Share(plan.owners, node), self._wire)
        except BudgetError as error:
            if len(plan.nodes) == 1:
                raise
            self._spread.take_less(error)
            return Unfit(str(error))
        self._rates.restart()
        if len(plan.nodes) > 1:
            self._mesh.publish_plan(self._lease, self._spread.plan_document())
            self._say(self._spread.plan_text())
        return Opened(instruction.epoch)

    def _replay(self, epoch: int) -> Event:
        if self._log.tokens:
            again = f"{self._log.tokens} tokens are computed again on {len(self._failover.nodes)} devices"
            self._say(f"{again}, about {self._log.seconds:.1f} s")
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

    def _named(self, text: str) -> str:
        """Return `text` with devices called what people call them."""
        for node, name in self._names.items():
            text = text.replace(node, name)
        return text

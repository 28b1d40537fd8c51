"""A run over a mesh: opens its devices, and goes on without those that are lost.

`failover.py` decides what to do, and this module does it. What was decoded is recorded, so that under a new plan all
caches can be emptied and the recorded batches run again in their recorded widths.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeGuard

from edge_run.base.errors import BudgetError, DeviceLost, EdgeRunError, MeshError, TierReadError, lacks_room, option
from edge_run.base.mesh import HasLeft, Joined, Lost, Member, Mesh, is_worker
from edge_run.base.mesh_status import MeshUse
from edge_run.partition.mesh_plan import MeshPlan
from edge_run.runtime.decoding.driver import GraphChanged
from edge_run.runtime.mesh import failover
from edge_run.runtime.mesh.activation_coding import ActivationCoder, SentActivations
from edge_run.runtime.mesh.blame import FAULTS, Blame
from edge_run.runtime.mesh.coordinator import FETCH_TOKENS, PAYS_BACK_TOKENS, LayerCoordinator, plan_text, reading_s
from edge_run.runtime.mesh.device_group import Attempt, DeviceGroup
from edge_run.runtime.mesh.in_flight import BatchesInFlight
from edge_run.runtime.mesh.log import MeshLog
from edge_run.runtime.mesh.messages import Command
from edge_run.runtime.mesh.orders import Failed
from edge_run.runtime.mesh.rates import MeshRates
from edge_run.runtime.mesh.replay import LogReplay, PlanTimes
from edge_run.runtime.mesh.run_events import RunEvents, is_end_of_lease
from edge_run.runtime.mesh.transport import PassFailed
from edge_run.runtime.slices.engine import SliceEngine

logger = logging.getLogger(__name__)

LEAD_TIMEOUT_S = 10.0
MOST_CONTEXTS = 2  # of tokens in a log that is not condensed


class MeshRun:
    """Carries out what the failover of a run decides, and tells it what came of that. Not thread-safe.

    It is long because whatever it does may fail, or be broken off, and has then to be made good for the devices, the
    log and the batches in flight together.

    log, rates: what was decoded, and what passes took.
    in_flight: the batches that whoever has the run has begun.
    """

    def __init__(
        self, mesh: Mesh, engine: SliceEngine, coordinator: LayerCoordinator, say: Callable[[str], None]
    ) -> None:
        """Spread the model over who is there, at once. Raises BudgetError where it does not fit all together.

        say: is told what the user should see.
        """
        self._mesh, self._engine, self._coordinator, self._say = mesh, engine, coordinator, say
        self.log = MeshLog(MOST_CONTEXTS * engine.loaded.context.context_tokens)
        self.rates = MeshRates()
        self._events, self._sent = RunEvents(mesh), SentActivations()
        self._lease = 0
        self._shortage: failover.LessRoom | None = None  # of another device, since slices were open
        self._group = self._make_group(coordinator.plan, 0)
        self.in_flight = BatchesInFlight(self.log, self.rates, self._group)
        self._replay = LogReplay(self.log, engine.maps, say)
        self._blame = Blame(mesh.node, coordinator.orders)
        self._asked: dict[str, Member] = {}  # devices as they were when they were asked, and this one then
        candidates = [member.node for member in mesh.members() if is_worker(member)]
        self._failover = failover.Failover(mesh.node, candidates)
        try:
            self._drive(self._failover.start())
        except BaseException:
            self.close()
            raise

    @property
    def use(self) -> MeshUse:
        """Who computes what, and what that took so far."""
        plan = self._coordinator.plan
        return MeshUse(
            epoch=self._failover.epoch,
            nodes=self._coordinator.describe(),
            rounds=plan.rounds,
            groups=self.in_flight.most,
            predicted_token_s=plan.token_s,
            token_s=self.rates.token_s,
            hop_s=self.rates.hop_s,
            sent_bytes=self._sent.sent_bytes,
            plain_bytes=self._sent.plain_bytes,
            activations=dict(self._sent.activations),
            recoveries=self._failover.recoveries,
            left_out={node: _why(one, self._events.names) for node, one in tuple(self._failover.left_out.items())},
        )

    def close(self) -> None:
        """Let the other devices go, and the lease. Idempotent."""
        self._failover.handle(failover.Ended())
        try:
            self._coordinator.orders.release()
        except MeshError as error:
            logger.info("%s", error)
        finally:
            if self._lease:
                with contextlib.suppress(MeshError):  # it ends soon
                    self._mesh.resign()

    @property
    def is_broken_off(self) -> bool:
        """Whether no plan is in force: before the next batch, all is computed anew as it is logged."""
        return self._failover.phase is not failover.Phase.RUNNING

    def tell(self, command: Command) -> None:
        """Have the other devices do what was done here, and logged; who is lost meanwhile fails the next batch."""
        if self.is_broken_off:
            return
        try:
            self._group.tell(command)
        except DeviceLost as error:
            logger.info("%s", error)
        except BaseException:
            self._break_off()  # some of them were not told
            raise

    def stop(self, command: Command) -> None:
        """Have the other devices take back the batch that was taken back here."""
        if self._failover.nodes:
            self._group.stop(command)

    def can_recover(self, error: BaseException) -> TypeGuard[EdgeRunError]:
        """Whether the run may go on after `error` of a pass: another device's, or this one's, which lacks room."""
        return isinstance(error, (*FAULTS, GraphChanged)) or (lacks_room(error) and bool(self._group.others))

    def recover(self, error: EdgeRunError) -> None:
        """Make it possible to go on after `error`, which a pass ended with, or raise it.

        Batches in flight are then begun again.
        """
        while True:
            logger.info("epoch %d, command %d: %s", self._failover.epoch, self._group.number, error)
            shape = self._replay.unknown_shape(error, self._group.batch_of(error))
            self.in_flight.give_up()
            if shape is None or (isinstance(error, PassFailed) and self._replay.is_learned(shape)):
                break
            try:
                self._replay.learn(shape, error, self.in_flight.perform)
                return
            except (*FAULTS, GraphChanged) as found:
                error = found
            except BaseException:
                self._break_off()  # all were emptied, and each has computed another part of it again
                raise
        self._react(self._blame.event_of(error, self._group.others))

    def look_around(self) -> None:
        """Hear who came and who went; between conversations, a new device is given its part."""
        if self.is_broken_off:  # by Ctrl-C or an error: it begins again when all is heard
            self._break_off()
        for event in self._events.take():
            if isinstance(event, Joined) and is_worker(event.member):
                self._failover.handle(failover.Appeared(event.member.node))
            elif isinstance(event, Lost):  # in their order: who was started anew is lost first, and then there
                self._react(failover.Gone(event.node, event.why))
            elif not self._is_alone and is_end_of_lease(event, self._lease):
                self._react(failover.Deposed(self._events.why_unled))
        self._look_who_is_back()
        if self.is_broken_off:
            self._drive(self._failover.start())
        why_more = "" if len(self.log) else self._failover.why_more
        may_group = self.in_flight.may_group
        if why := why_more or self.rates.why_replan(self._coordinator, self.log.tokens, may_group=may_group):
            self._react(failover.Better(why))

    def _look_who_is_back(self) -> None:
        """Have devices take part again that were lost or refused, and are there: in the next plan."""
        members = self._mesh.members()
        for member in members:
            if member.places != self._asked.get(member.node, member).places:
                self._asked[member.node] = replace(self._asked[member.node], places=member.places)
                apart = frozenset(self._coordinator.links.forget(member.node))
                self._failover.handle(failover.Moved(member.node, apart))
        for member in filter(is_worker, members):
            node = member.node
            is_anew = self._asked.get(node, member).incarnation != member.incarnation
            is_back = not len(self.log) and self._failover.may_return(node)
            if is_back and not is_anew and node in self._failover.left_out and not self.is_broken_off:
                is_back = self._takes_part(node)
            if is_anew or is_back:
                self._failover.handle(failover.Appeared(node, is_anew))

    def _takes_part(self, node: str) -> bool:
        """Ask a device that had refused once more, before others compute by another plan for its sake."""
        try:
            self._coordinator.ask({node})
        except HasLeft:  # the next pass says so
            return False
        except Failed as failed:
            self._failover.handle(failed.refusal)
            self._coordinator.orders.release(
                {node}
            )  # it may have the model open, and no plan comes that would end that
            return False
        return True

    @property
    def _is_alone(self) -> bool:
        """Whether this device computes all, which needs no lease."""
        return self._failover.nodes == (self._mesh.node,)

    def _make_group(self, plan: MeshPlan, epoch: int) -> DeviceGroup:
        speeds = self._coordinator.links.speeds(self._mesh.node, plan.nodes)
        coder = ActivationCoder(self._engine.config.mesh_activations, speeds, self._sent)
        waits_s = reading_s(plan, self._coordinator.works, self._coordinator.specs)
        attempt = Attempt(plan, epoch, self._lease, waits_s)
        return DeviceGroup(self._mesh, self._engine, self._events, attempt, coder)

    def _break_off(self) -> None:
        """Devices may hold different things from now on."""
        self._failover.handle(failover.Ended())

    def _react(self, event: failover.Event) -> None:
        """Do what `event` makes necessary."""
        if instructions := self._decide(event):
            self._drive(instructions)

    def _decide(self, event: failover.Event) -> list[failover.Instruction]:
        """Return what is to be done after `event`."""
        if isinstance(event, failover.LessRoom):
            self._coordinator.take_less(event.node, event.error)
            if event.node in self._failover.nodes and event.node != self._mesh.node:
                self._shortage = event
        elif isinstance(event, failover.Apart):
            self._coordinator.links.note_apart(event.teller, event.node)
        elif isinstance(event, failover.GaveUp):
            self._coordinator.specs.pop(event.node, None)  # it is asked anew: it may have closed the model
        return self._failover.handle(event)

    def _why_no_room(self) -> EdgeRunError | None:
        """Return the error of a device that was needed, and has no room: that is what is to be mended."""
        if self._shortage is None:
            return None
        node, error = self._shortage.node, self._shortage.error
        return replace(error, message=f"{self._events.names.get(node, node)}: {error.message}")

    def _drive(self, instructions: Sequence[failover.Instruction]) -> None:
        """Carry out instructions, and what follows from each, until there are none."""
        waiting = list(instructions)
        while waiting:
            event = self._execute(waiting.pop(0))
            if event is not None:
                waiting = self._decide(event) or waiting
        if self.is_broken_off:
            raise MeshError(
                f"the mesh does not get on: it waits for {self._failover.phase.value}; `edge-run mesh doctor` says "
                f"what is in the way, without {option('mesh')} the model runs here"
            )

    def _execute(self, instruction: failover.Instruction) -> failover.Event | None:
        """Carry out one instruction; return what came of it."""
        try:
            if isinstance(instruction, failover.TellUser):
                self._say(_words(instruction, self._events.names))
            elif isinstance(instruction, failover.Lead):
                return self._lead()
            elif isinstance(instruction, failover.MakePlan):
                return self._make_plan(instruction.candidates)
            elif isinstance(instruction, failover.Open):
                return self._open(instruction)
            elif isinstance(instruction, failover.ReplayLog):
                return self._replay_log(instruction)
        except Failed as failed:
            if not self._is_alone and self._events.take_end_of_lease(self._lease):
                return failover.Deposed(self._events.why_unled)  # who does not obey has nothing against this run
            return failed.event
        except (HasLeft, *FAULTS) as error:
            return self._blame.event_of(error, self._group.others)
        return None

    def _replay_log(self, instruction: failover.ReplayLog) -> failover.Event:
        try:
            self._replay.run(self.in_flight.perform, self._group.batch_of, len(self._failover.nodes))
        except (BudgetError, TierReadError) as error:  # of this device, which may lack room
            return self._blame.event_of(error, self._group.others)
        return failover.Replayed(instruction.epoch)

    def _lead(self) -> failover.Event:
        try:
            lease = self._mesh.lead(timeout_s=LEAD_TIMEOUT_S, check=self._engine.interrupt.check)
        except MeshError as error:
            return failover.NotLed(str(error))
        if lease != self._lease:
            self._coordinator.forget_others()  # another coordinator may have had them do something else in between
        self._lease = lease
        return failover.Led(lease)

    def _make_plan(self, candidates: Sequence[str]) -> failover.Event:
        before, asked = self._asked, {*candidates, self._mesh.node}
        now = {member.node: member for member in self._mesh.members() if member.node in asked}
        anew = {node for node, one in now.items() if node in before and before[node].incarnation != one.incarnation}
        for node in anew | self._events.take_returns():  # they may have closed the model
            self._coordinator.specs.pop(node, None)
        for node in now.keys() & before.keys():
            if now[node].places != before[node].places:  # which the plan that is made now takes into account
                self._coordinator.links.forget(node)
                self._failover.handle(failover.Moved(node))
        self._asked = before | now
        self._coordinator.prepare(candidates)
        fetch_tokens = PAYS_BACK_TOKENS if self.log.tokens else FETCH_TOKENS
        plan = self._coordinator.make_plan(fetch_tokens, may_group=self.in_flight.may_group)
        return failover.Planned(plan.nodes)

    def _open(self, instruction: failover.Open) -> failover.Event:
        plan = self._coordinator.plan
        if set(plan.nodes) != set(instruction.nodes):
            plan = self._coordinator.alone()
        self._group = self._make_group(plan, instruction.epoch)
        self.in_flight.use(self._group)
        self._replay.forget_shapes()
        self._coordinator.open(plan, instruction.epoch)
        try:
            self._group.assign()
        except BudgetError as error:
            if len(plan.nodes) > 1:
                return failover.LessRoom(self._mesh.node, error)
            raise (self._why_no_room() or error) from error
        self._shortage = None
        times = PlanTimes(0.0, plan.token_s, self._group.attempt.reading_s)
        self._replay.change_plan(times, self.rates.token_s)
        self.rates.restart()
        if len(plan.nodes) > 1:
            self._mesh.publish_plan(self._lease, self._coordinator.plan_document())
            self._say(plan_text(plan, self._coordinator.describe()))
        orders, answering = self._coordinator.orders, self._failover.candidates | self._failover.left_out.keys()
        unused = orders.holding - set(plan.nodes)  # what they hold is others' meanwhile
        orders.release(unused & answering)
        orders.release(unused - answering, is_awaited=False)  # they were given up, and may be there all the same
        return failover.Opened(instruction.epoch)


def _words(told: failover.TellUser, names: Mapping[str, str]) -> str:
    """Return what the user is told, with devices called what people call them."""
    whose = f"{names.get(told.node, told.node)} " if told.node else ""
    why = f": {_why(told, names)}" if told.why else ""
    by = f", says {names.get(told.teller, told.teller)}" if told.teller else ""
    return f"{whose}{told.text}{why}{by}"


def _why(one: failover.TellUser | failover.Refused, names: Mapping[str, str]) -> str:
    return f"{names.get(one.about, one.about)} {one.why}" if one.about else one.why

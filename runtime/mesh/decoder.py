"""A decoder over a mesh: the same to the generate loop as a local one, and it goes on when a device dies.

All devices run llama.cpp on the same batches; this one has the head and the tail, and its callback hands activations
on and waits for them. What was decoded is recorded. When a device is lost, the rest take its layers under a new epoch,
all caches are emptied, and the recorded batches are run again in their recorded widths: so the text goes on as if
nothing had happened. What to do when is decided in `failover.py`, and done in `run.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from edge_run.base.errors import DeviceLost
from edge_run.base.mesh import Document, Joined, Lost, is_worker
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.base.results import MeshUse, Numerics
from edge_run.runtime.decoding.driver import GraphChanged
from edge_run.runtime.mesh.failover import (
    Appeared,
    Better,
    Deposed,
    Gone,
    Phase,
)
from edge_run.runtime.mesh.messages import Decode, Operate
from edge_run.runtime.mesh.run import FAULTS, LED_BY_ANOTHER, MeshRun
from edge_run.runtime.mesh.transport import SEND_TIMEOUT_S

logger = logging.getLogger(__name__)


class MeshDecoder(MeshRun):
    """The decoder of a coordinator. Not thread-safe."""

    @property
    def capabilities(self) -> Capabilities:
        """What this decoder can do."""
        return self._local.capabilities

    @property
    def numerics(self) -> Numerics:
        """The numerics key, with what activations are that come from other devices."""
        return self._engine.numerics

    @property
    def use(self) -> MeshUse:
        """Who computes what, and what that took so far."""
        plan = self._coordinator.plan
        return MeshUse(
            epoch=self._failover.epoch,
            nodes=self._coordinator.describe(),
            rounds=plan.rounds if plan else 1,
            predicted_token_s=plan.token_s if plan else 0.0,
            token_s=self._rates.token_s,
            hop_s=self._rates.hop_s,
            sent_bytes=self._sent.sent_bytes,
            plain_bytes=self._sent.plain_bytes,
            activations=dict(self._sent.activations),
            recoveries=self._failover.recoveries,
            left_out=dict(self._failover.left_out),
        )

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        """Run a batch; see `Decoder.decode`. Devices that are lost meanwhile are done without."""
        self._local.limits.check_batch(batch)
        self._look_around()
        while True:
            try:
                started = time.monotonic()
                rows = self._tell_all(Decode(tuple(batch)))
                assert rows is not None
            except (*FAULTS, GraphChanged) as error:
                self._recover(error, batch)
                continue
            except BaseException:
                self._stop(batch)
                raise
            seconds = time.monotonic() - started
            self._log.add_batch(batch, seconds)
            self._rates.note(len(batch), seconds, self._transport.spent, self._transport.hops)
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
        heard, self._heard = [*self._heard, *self._mesh.wait(timeout_s=0.0)], []
        for event in heard:
            if isinstance(event, Joined):
                self._members[event.member.node] = event.member
                if is_worker(event.member):
                    self._failover.handle(Appeared(event.member.node))
            elif isinstance(event, Lost):  # in their order: who was started anew is lost first, and then there
                self._drive(self._failover.handle(Gone(event.node, event.why)))
            elif self._is_end_of_lease(event):
                self._drive(self._failover.handle(Deposed(LED_BY_ANOTHER)))
        for member in self._mesh.members():
            if is_worker(member) and self._incarnations.get(member.node, member.incarnation) != member.incarnation:
                self._failover.handle(
                    Appeared(member.node)
                )  # in another incarnation than that which was asked, and lost
        if self._failover.wants_more and not len(self._log):
            self._drive(self._failover.handle(Better("a device joined")))
        elif why := self._rates.why_replan(self._coordinator, self._log.tokens):
            self._drive(self._failover.handle(Better(why)))

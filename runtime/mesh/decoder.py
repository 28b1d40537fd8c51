"""A decoder over a mesh, which the generate loop uses like a local one, and which goes on when a device is lost.

All devices run llama.cpp on the same batches. This device has the head and the tail, and its callback hands
activations on and waits for them. What was decoded is recorded. When a device is lost, the remaining devices take its
layers under a new epoch, empty all caches, and run the recorded batches again in their recorded widths, so that the
text continues as if nothing had happened. `failover.py` decides what to do, and `run.py` does it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from edge_run.base.mesh import Mesh
from edge_run.base.mesh_status import MeshUse
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.decoding.driver import GraphChanged
from edge_run.runtime.mesh.blame import FAULTS
from edge_run.runtime.mesh.messages import Decode, Operate
from edge_run.runtime.mesh.run import MeshRun

REPORT_EVERY_S = 1.0


class MeshDecoder:
    """Decodes with all devices of a run. Not thread-safe."""

    def __init__(self, mesh: Mesh, local: LocalDecoder, run: MeshRun) -> None:
        """local: decodes this device's part. run: all devices; it is closed with the decoder."""
        self._mesh, self._local, self._run = mesh, local, run
        self._reported_s = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """What this decoder can do."""
        return self._local.capabilities

    @property
    def use(self) -> MeshUse:
        """Who computes what, and what that took so far."""
        return self._run.use

    def close(self) -> None:
        """Let the other devices go. Idempotent."""
        self._run.close()

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        """Run a batch; see `Decoder.decode`. Devices that are lost meanwhile are done without."""
        self._local.limits.check_batch(batch)
        self._run.look_around()
        command = Decode(tuple(batch))
        while True:
            started_s = time.monotonic()
            try:
                rows = self._run.perform(command)
            except (*FAULTS, GraphChanged) as error:
                self._run.recover(error, batch)
                continue
            except BaseException:
                self._stop(batch)
                raise
            assert rows is not None, "a batch has logits, or none of its tokens wants any"
            seconds = time.monotonic() - started_s
            self._run.log.add(command, seconds)
            self._run.note(len(batch), seconds)
            self._report()
            return rows

    def rewind(self, sequence: int, position: int) -> int:
        """Forget `sequence` from `position` on; return where it ends now."""
        end = self._local.rewind(sequence, position)
        self._run.log.rewind(sequence, position, end)
        self._run.tell(Operate("rewind", (sequence, position)))
        return end

    def branch(self, sequence: int, branches: Sequence[int]) -> None:
        """Let each of `branches` hold what `sequence` holds, and nothing else; nothing is copied."""
        self._local.branch(sequence, branches)
        self._log_and_tell(Operate("branch", (sequence, *branches)))

    def keep(self, sequence: int, position: int, branch: int, branches: Sequence[int]) -> None:
        """Let `sequence` go on as `branch` does from `position` on, and empty all `branches`."""
        self._local.keep(sequence, position, branch, branches)
        self._log_and_tell(Operate("keep", (sequence, position, branch, *branches)))

    def _log_and_tell(self, command: Operate) -> None:
        self._run.log.add(command)
        self._run.tell(command)

    def _report(self) -> None:
        """Let others see how fast it goes, once a second."""
        now_s, token_s = time.monotonic(), self._run.rates.token_s
        if now_s - self._reported_s >= REPORT_EVERY_S and token_s:
            self._reported_s = now_s
            self._mesh.report({"tokens_per_s": round(1 / token_s, 3)})

    def _stop(self, batch: Sequence[BatchToken]) -> None:
        """The batch was taken back here: have the others take it back too."""
        for sequence in {token.sequence for token in batch}:
            first = min(token.position for token in batch if token.sequence == sequence)
            self._run.log.rewind(sequence, first, first if self.capabilities.can_rewind else 0)
        self._run.stop()

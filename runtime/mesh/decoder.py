"""A decoder over a mesh, which the generate loop uses like a local one, and which goes on when a device is lost.

All devices run llama.cpp on the same batches. This device has the head and the tail, and its callback hands
activations on and waits for them. What was decoded is recorded. When a device is lost, the remaining devices take its
layers under a new epoch, empty all caches, and run the recorded batches again in their recorded widths, so that the
text continues as if nothing had happened. `failover.py` decides what to do, and `run.py` does it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edge_run.base.errors import EdgeRunError, MeshError
from edge_run.base.mesh import Mesh
from edge_run.base.mesh_status import MeshUse
from edge_run.base.protocols import BatchToken, Capabilities, Logits
from edge_run.runtime.decoding.decoder import LocalDecoder
from edge_run.runtime.mesh.messages import Decode, Operate
from edge_run.runtime.mesh.run import MeshRun

REPORT_EVERY_S = 1.0
IDLE_S, IDLE_TOKENS = 5.0, 4  # a speed counts for so long, or for the time of so many tokens


class MeshDecoder:
    """Decodes with all devices of a run; it is a `PassQueue` too. Not thread-safe.

    capabilities: what it can do. Where passes may be in flight, so many cells stay free as their tails take.
    """

    def __init__(self, mesh: Mesh, local: LocalDecoder, run: MeshRun, tail_cells: int) -> None:
        """local: decodes this device's part. run: all devices; it is closed with the decoder.

        tail_cells: what the tail of a pass takes of the context, for a moment.
        """
        self._mesh, self._local, self._run = mesh, local, run
        able, self._has_tails = local.capabilities, tail_cells > 0
        self.capabilities: Capabilities = replace(able, context_tokens=able.context_tokens - tail_cells)
        self._reported_s = 0.0

    @property
    def use(self) -> MeshUse:
        """Who computes what, and what that took so far."""
        return self._run.use

    @property
    def most_in_flight(self) -> int:
        """How many batches in flight are of use, under the plan in force."""
        return self._run.in_flight.most

    def close(self) -> None:
        """Let the other devices go. Idempotent."""
        self._run.close()

    def decode(self, batch: Sequence[BatchToken]) -> Logits:
        """Run a batch; see `Decoder.decode`. Devices that are lost meanwhile are done without."""
        assert not len(self._run.in_flight), "what is in flight comes first"
        self._local.limits.check_batch(batch)
        # A plan by which tails are apart, of one pass each, may come while the first part is begun.
        width = self.capabilities.micro_batch_tokens if self._has_tails else len(batch)
        found = []
        for start in range(0, len(batch), width):
            part = batch[start : start + width]
            self.begin(part)
            try:
                found.append(self.finish())
            except BaseException:
                for sequence, position in _beginnings(part).items():
                    self.rewind(sequence, position)
                raise
            if width < len(batch):
                found[-1] = found[-1].copy()
        return found[0] if len(found) == 1 else np.concatenate(found)

    def begin(self, batch: Sequence[BatchToken]) -> None:
        """Begin a batch; see `PassQueue.begin`. Where no others are of use in flight, it is computed at once.

        Raises MeshError, too, where a cut before it was broken off and the caller takes sequences for longer than that
        left them; once it has cut them again it knows.
        """
        self._local.limits.check_batch(batch)
        self._run.look_around()
        if not self._run.log.holds(batch):
            raise MeshError("devices were interrupted while they cut the text, and hold less of it; ask once more")
        command = Decode(tuple(batch))
        try:
            self._run.in_flight.begin(command)
            return
        except BaseException as error:
            if not self._run.can_recover(error):
                self._run.in_flight.forget(command)
                self._stop(command)
                raise
            fault = error
        try:
            self._run.recover(fault)
        except BaseException:
            self._run.in_flight.forget(command)
            raise

    def finish(self) -> Logits:
        """Return the rows of the batch that was begun first; see `PassQueue.finish`."""
        try:
            while True:
                try:
                    rows = self._run.in_flight.finish()
                except EdgeRunError as error:
                    if not self._run.can_recover(error):
                        raise
                    self._run.recover(error)
                else:
                    self._report()
                    return rows
        except BaseException:
            self._run.in_flight.forget_all()
            raise

    def abandon(self) -> None:
        """Forget all batches in flight; what the caller says next tells the other devices that they are over."""
        self._run.in_flight.forget_all()

    def rewind(self, sequence: int, position: int) -> int:
        """Forget `sequence` from `position` on; return where it ends now.

        All of it is forgotten where the run is broken off: this device's cells then say nothing of what is logged.
        """
        position = 0 if self._run.is_broken_off else position
        end = self._local.rewind(sequence, position)
        self._run.log.rewind(sequence, end)
        self._run.tell(Operate("rewind", (sequence, end)))
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
            self._mesh.report({"tokens_per_s": round(1 / token_s, 3)}, lasts_s=max(IDLE_S, IDLE_TOKENS * token_s))

    def _stop(self, command: Decode) -> None:
        """The batch was taken back here: have the others take it back too."""
        able, is_long = self.capabilities, len(command.batch) > self.capabilities.micro_batch_tokens
        # Others may be a pass ahead, and state that cannot be cut, or cells that a window has left, may be gone there.
        # Or they had begun one, across the end of a ring, that this device had not.
        can_cut = able.can_rewind and not ((is_long or able.ring_tokens) and self._local.limits.has_window)
        beginnings = _beginnings(command.batch)
        for sequence, first in beginnings.items():
            end = self._local.rewind(sequence, first if can_cut else 0)
            self._run.log.rewind(sequence, end)
        self._run.stop(command)
        if not able.can_rewind and len(beginnings) > 1:  # a device that was in it has emptied all (`Rollback.is_torn`)
            for sequence in range(able.sequences):
                self.rewind(sequence, 0)


def _beginnings(batch: Sequence[BatchToken]) -> dict[int, int]:
    """Return where each sequence of a batch ended before it."""
    found: dict[int, int] = {}
    for token in batch:
        found[token.sequence] = min(token.position, found.get(token.sequence, token.position))
    return found

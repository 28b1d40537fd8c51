"""The computing thread of a worker: carries out commands that come over the data link, for one run at a time."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable

from edge_run.base.error_codes import error_document
from edge_run.base.errors import Cancelled, DeviceLost, EdgeRunError, MeshError, ProtocolError
from edge_run.base.fields import MOST_WORDS, Document, Fields, plain
from edge_run.base.mesh import Link, Message
from edge_run.runtime.mesh.commands import carry_out
from edge_run.runtime.mesh.messages import Command, Decode, Operate, read_command
from edge_run.runtime.mesh.transport import SEND_TIMEOUT_S, code_of
from edge_run.runtime.slices.slice import NotNumbers
from edge_run.runtime.worker.run import WorkerRun
from edge_run.runtime.worker.work_report import WorkReport

logger = logging.getLogger(__name__)

IDLE_POLL_S = 0.1
TELL_EVERY_S = 0.5
STOP_TIMEOUT_S = 30.0
MOST_DROPPED = 1000  # messages at a time
UNREACHED = "it is not reached"  # why not would tell who named the address which ports are open there


class RunThread:
    """Computes for one run at a time. `begin`, `end` and `close` are for one thread at a time.

    run: the run in force.
    ended_s: when the latest run ended, by the monotonic clock.
    """

    def __init__(
        self, link: Link, report: Callable[[Document], None], when_idle: Callable[[], None] = lambda: None
    ) -> None:
        """Compute for who is reached by `link`.

        report: takes what others are to see of the work here.
        when_idle: runs now and then while there is no run, on the thread that computes; it must not wait.
        """
        self._link, self._shown, self._when_idle = link, WorkReport(report), when_idle
        self.run: WorkerRun | None = None
        self.ended_s = -math.inf
        self._busy_with: WorkerRun | None = None
        self._lock = threading.RLock()
        self._changing = threading.Condition(self._lock)
        self._is_closed, self._why_ended = False, ""
        self._given_up: tuple[str, int] | None = None  # whose run, under which epoch: its coordinator may not know yet
        self._tell_s = 0.0
        self._last: Command = Operate("clear")
        self._thread = threading.Thread(target=self._serve, name="edge-run-worker", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._link.overhear(self._overhear)
        self._thread.start()

    def begin(self, run: WorkerRun) -> None:
        """Compute for `run` from now on; there is no other. Raises MeshError where nothing is computed any more."""
        with self._lock:
            if self._why_ended:
                raise MeshError(f"this device computes no more ({self._why_ended}); start it anew")
            self.run = run
            self._changing.notify_all()

    def end(self) -> None:
        """Stop the pass in progress, and wait until the thread is out of it. Raises MeshError where that takes long."""
        with self._lock:
            if self.run:
                self.run.end()
                self.ended_s = time.monotonic()
            self.run = self._given_up = None
            if self._busy_with:
                self._busy_with.engine.interrupt.cancel()
            if threading.current_thread() is not self._thread and not self._changing.wait_for(
                lambda: self._busy_with is None, STOP_TIMEOUT_S
            ):
                raise MeshError(f"the pass in progress did not stop in {STOP_TIMEOUT_S:.0f} s")

    def close(self) -> None:
        """End the run, and join the thread. Idempotent."""
        self._is_closed = True
        self.end()
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)

    def _overhear(self, item: Message | DeviceLost) -> None:
        """Stop the pass in progress at once when what comes ends it; it is received afterwards as ever."""
        if (run := self.run) is not None:
            run.overhear(item)
            if run.is_ended_by(item):
                run.engine.interrupt.cancel()

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                self._take_turn()
        except Exception as error:
            logger.exception("a mistake of edge-run's own; this device computes no more for others")
            with self._lock:
                self._why_ended = f"a mistake of edge-run's own: {type(error).__name__}"
                self.run = self._busy_with = None  # nobody is to wait for what is computed no more
                self._changing.notify_all()

    def _take_turn(self) -> None:
        """Carry out a command of the run in force, if one comes; while there is no run, see to what is left of it."""
        with self._lock:
            self._changing.wait_for(lambda: self.run is not None or self._is_closed, IDLE_POLL_S)
            run = self._busy_with = self.run
            if run is None:  # while no other begins: its commands come later
                self._drop()
        try:
            self._shown.tell(run.model if run else "")
            if run is not None:
                self._step(run)
            else:
                self._tell_that_it_is_over()
                self._when_idle()
        except DeviceLost as error:
            if run is not None and error.node == run.coordinator:
                self._give_up(run)
        except MeshError as error:  # of the link, by which nothing comes any more
            logger.warning("%s", error)
            if run is not None:
                self._give_up(run)
        except EdgeRunError as error:
            logger.warning("%s", error)
        except Exception:
            logger.exception("a mistake of ours; the run is given up")
            if run is not None:
                self._give_up(run)
        finally:
            with self._lock:
                self._busy_with = None
                self._changing.notify_all()

    def _drop(self) -> None:
        """Receive what has come, which is nobody's: a full queue would have the link read nothing more."""
        for _ in range(MOST_DROPPED):
            try:
                if self._link.receive(timeout_s=0.0) is None:
                    return
            except DeviceLost:
                continue
            except MeshError:  # the link is closed
                return

    def _give_up(self, run: WorkerRun) -> None:
        """The coordinator is gone: what was decoded is nobody's, and its weights need not stay."""
        run.end()
        with self._lock:
            if self.run is run:  # else it was ended meanwhile, by an order, and nobody waits
                self.run, self._given_up = None, (run.coordinator, run.epoch)
                self.ended_s = time.monotonic()
        try:
            run.engine.release()
        except (EdgeRunError, OSError) as error:
            logger.warning("weights of a run that is over stay until the next one (%s)", error)

    def _tell_that_it_is_over(self) -> None:
        """Tell a coordinator whose run was given up here, as soon as it is there again: it may be waiting."""
        given_up, now_s = self._given_up, time.monotonic()
        if given_up is None or now_s < self._tell_s:
            return
        (node, epoch), self._tell_s = given_up, now_s + TELL_EVERY_S
        with contextlib.suppress(EdgeRunError):
            self._link.send(node, {"kind": "over", "epoch": epoch}, timeout_s=IDLE_POLL_S)
            with self._lock:
                if self._given_up is given_up:
                    self._given_up = None

    def _step(self, run: WorkerRun) -> None:
        """Carry out the next command, if one comes."""
        message = run.transport.command(IDLE_POLL_S)
        if message is None or run.is_over:
            return
        fields = Fields(message.header, "a command", message.node)
        kind, number = fields.name("kind"), fields.integer("number")
        is_again = fields.has("again") and fields.flag("again")
        if kind == "stop":
            self._undo(run, number)
        elif kind == "command":
            try:
                command = read_command(message, run.engine.decoder.limits)
                if isinstance(command, Decode) and number < run.transport.oldest:
                    return  # its coordinator gave it up while this device waited in a pass before it
                self._last = command
                run.engine.interrupt.reset()
                run.begin(number)
                carry_out(run.engine, command)
                if isinstance(command, Decode) and not is_again:
                    self._shown.count(sum(token.wants_logits for token in command.batch))
            except Cancelled:
                raise
            except DeviceLost as error:  # the coordinator cannot know that an activation went nowhere
                if error.node != run.coordinator:
                    self._report(run, number, error)
                raise
            except EdgeRunError as error:
                self._report(run, number, error)
            finally:
                run.transport.finish()

    def _undo(self, run: WorkerRun, number: int) -> None:
        """Take back a batch that was stopped when this device was done with it already."""
        if run.done == number and isinstance(self._last, Decode):
            run.engine.decoder.take_back(self._last.batch)
            self._last = Operate("clear")

    def _report(self, run: WorkerRun, number: int, error: EdgeRunError) -> None:
        """Tell the coordinator that this device cannot do its part, or which other device keeps it from that."""
        other = error.node if isinstance(error, DeviceLost | ProtocolError | NotNumbers) else ""
        is_lost = isinstance(error, DeviceLost)
        header: Document = {
            "kind": "failed",
            "epoch": run.epoch,
            "number": number,
            **error_document(error),
            "code": code_of(error),
            "error": UNREACHED if is_lost else plain(error.message, MOST_WORDS),
            "lost": other if is_lost else "",
            "blames": other if isinstance(error, ProtocolError | NotNumbers) else "",
        }
        logger.warning("%s", error)
        self._link.send(run.coordinator, header, timeout_s=SEND_TIMEOUT_S)

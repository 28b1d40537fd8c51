"""Drives a pass: follows llama.cpp's graph node by node and lets features take part in it.

llama.cpp calls back before it computes a node, and again afterwards where the first call asked for a stop. The callback
only runs the steps that features registered for the node's ordinal when the program was compiled. From the first
unexpected node on, it asks the features about each node instead, and the graph that it saw becomes the program of that
shape. So an unexpected graph is slower once, and never wrong.

llama.cpp asks about all nodes up to the next stop before it computes any of them. So a feature makes a node's weights
readable in a step before the node, and they stay readable for the whole segment. Weights for a GPU are copied there
earlier still (`weight_copies.py`); the graph then counts as expected only if the scheduler splits it as expected. The
callback never raises. After a failure it clears the compute flag of all following nodes, so that nothing is computed on
missing memory, and the error is raised when llama.cpp returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from edge_run.base.errors import Cancelled, KernelError
from edge_run.base.interrupt import Interrupt
from edge_run.runtime.decoding.compute_buffer import ComputeBuffer
from edge_run.runtime.decoding.weight_copies import CopySchedule, WeightCopies
from edge_run.runtime.graph.flow import Flow
from edge_run.runtime.graph.flow_observer import FlowObserver
from edge_run.runtime.graph.nodes import GraphMap, Node
from edge_run.runtime.graph.observer import Observer
from edge_run.runtime.graph.scheduler_splits import Split
from edge_run.runtime.llama import _ggml as ggml

MOST_PROGRAMS = 64  # a shape whose program is not known is guessed; one has a thousand nodes and more
Step = Callable[[int], None]


class GraphChanged(KernelError):
    """A graph was not the expected one where it had to be; the results of the pass are void."""


class PassShape(NamedTuple):
    """The shape of a pass, which decides the graph that llama.cpp builds.

    tokens: the tokens of the pass.
    outputs: the rows of logits.
    """

    tokens: int
    outputs: int

    @property
    def kind(self) -> tuple[bool, bool]:
        """Whether there are several tokens, and any logits; shapes of one kind mostly have the same graph."""
        return self.tokens > 1, self.outputs > 0


ONE_TOKEN = PassShape(1, 1)


@dataclass(slots=True)
class Steps:
    """The steps of all features, by the ordinal of their node; a step is called with the tensor's address.

    before: the steps that run when llama.cpp asks about a node.
    after: the steps that run when a node is computed; llama.cpp stops there.
    """

    before: dict[int, list[Step]] = field(default_factory=dict)
    after: dict[int, list[Step]] = field(default_factory=dict)

    def add_before(self, ordinal: int, step: Step) -> None:
        """Run `step` when node `ordinal` is asked about."""
        self.before.setdefault(ordinal, []).append(step)

    def stop_before(self, ordinal: int, step: Step) -> None:
        """Run `step` when node `ordinal` is asked about and all nodes before it are computed."""
        self.add_after(ordinal - 1, _only_stop)
        self.add_before(ordinal, step)

    def add_after(self, ordinal: int, step: Step) -> None:
        """Stop after node `ordinal`, and run `step` there."""
        self.after.setdefault(ordinal, []).append(step)


def _only_stop(address: int) -> None:
    """Do nothing."""


class Part(Protocol):
    """Something that has steps in a known graph."""

    def register(self, graph: GraphMap, steps: Steps) -> None:
        """Add the steps for `graph`."""
        ...


class Feature(Part, Protocol):
    """Something that takes part in passes. A method that raises makes the pass void."""

    def before_unknown(self, node: Node, address: int) -> bool:
        """Do what `node` of an unknown graph needs; return whether to stop after the node."""
        ...

    def after_unknown(self) -> None:
        """Go on after a stop that `before_unknown` asked for."""
        ...

    def abandon(self) -> None:
        """Release everything: the pass failed, ended unexpectedly or computes nothing, and llama.cpp does nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Program:
    """A graph and its steps, in tables by ordinal.

    graph: the nodes.
    before: the steps when llama.cpp asks about a node.
    after: the steps when a node is computed.
    splits: how the scheduler splits the graph, where weights are copied to a GPU.
    quiet: the nodes without steps, None for the others.
    """

    graph: GraphMap
    before: tuple[tuple[Step, ...], ...]
    after: tuple[tuple[Step, ...], ...]
    splits: tuple[Split, ...] = ()
    quiet: tuple[Node | None, ...] = ()


def compile_program(graph: GraphMap, parts: Sequence[Part], splits: tuple[Split, ...] = ()) -> Program:
    """Return the program of `graph` with the steps of all parts, in the order of the parts."""
    steps = Steps()
    for part in parts:
        part.register(graph, steps)
    ordinals = range(len(graph))
    return Program(
        graph,
        tuple(tuple(steps.before.get(i, ())) for i in ordinals),
        tuple(tuple(steps.after.get(i, ())) for i in ordinals),
        splits,
        tuple(None if i in steps.before or i in steps.after else node for i, node in enumerate(graph)),
    )


class Driver:
    """The callback of one llama.cpp context. One pass at a time; `interrupt` may be set by any thread.

    stop: is set while the pass in progress is to end; llama.cpp looks at it after each node that it computes.
    before_pass: runs before each pass, and may raise; nothing is computed then.
    compute_buffer: the memory that the pass in progress, or the last pass, computes in. observer: looks at nodes.
    expects_shift: whether llama.cpp turns keys before it computes the next pass.
    is_partial: whether programs leave some nodes out, so that an unexpected graph is refused with GraphChanged.

    It is over 200 lines because the calls of one pass share the pass's state: each takes up where the last one ended.
    """

    def __init__(self, interrupt: Interrupt | None = None, *, is_partial: bool = False) -> None:
        self.interrupt = interrupt or Interrupt()
        self.interrupt.tell(self._hear)
        self.features, self._pending = list[Feature](), list[Feature]()
        self.programs: dict[PassShape, Program] = {}
        self.is_partial, self.stop = is_partial, ggml.StopFlag()
        self.before_pass: Callable[[PassShape], None] = lambda shape: None
        self._flow: FlowObserver | None = None
        self._look: Step = _only_stop
        self.observer = Observer()
        self._program, self._quiet = _EMPTY, _EMPTY.quiet  # the latter is the program's while the pass goes as expected
        self._cursor = self._at = 0
        self._seen: list[Node] | None = None
        self._failure: BaseException | None = None
        self._is_mapping = self._must_restore = self.expects_shift = False
        self.compute_buffer = ComputeBuffer()
        self._cuts: CopySchedule | None = None
        self._copies: WeightCopies | None = None

    def follow_cuts(self, cuts: CopySchedule) -> None:
        """Follow how the scheduler splits graphs, where llama.cpp copies weights to a GPU."""
        self._cuts, self.observer = cuts, Observer(cuts.reads)

    def follow_copies(self, copies: WeightCopies) -> None:
        """Stop where llama.cpp copies weights to a GPU."""
        self._copies = copies

    @property
    def share_done(self) -> float:
        """The share of the pass in progress that llama.cpp has asked about, 0 to 1. Thread-safe."""
        return self._cursor / max(1, len(self._program.graph))

    def _hear(self, is_interrupted: bool) -> None:
        """End the pass in progress at its next node, which raises Cancelled; or let passes run again."""
        if is_interrupted:
            self._quiet = _EMPTY.quiet
        self.stop.set(is_interrupted)

    def callback(self, address: int, is_asking: bool, _: int) -> bool:
        """Answer llama.cpp's scheduler. Never raises."""
        try:
            if not is_asking:
                return self._told(address)
            i, quiet = self._cursor, self._quiet
            if i < len(quiet) and (node := quiet[i]) and ggml.settle(address, node.name, node.is_computed):
                self._cursor = i + 1
                return False
            if not self.compute_buffer.size_bytes:
                self.compute_buffer.note(address)
            return (self._skip if self._failure is not None or self._is_mapping else self._ask)(address)
        except BaseException as error:
            self._fail(error, address)
            return not is_asking

    @contextlib.contextmanager
    def mapping(self, *, notes_nodes: bool = True) -> Iterator[None]:
        """Let passes in this block compute nothing; `take_map` then returns the graph, empty unless nodes are noted.

        `take_flow` returns its flow. Raises the callback's errors.
        """
        self._flow = FlowObserver()
        self._look = self._flow.observe
        with self._computing_nothing([] if notes_nodes else None):
            yield

    @contextlib.contextmanager
    def placing(self, shape: PassShape, look: Step) -> Iterator[None]:
        """Let one pass of the given shape put its tokens into cells in this block, and compute nothing.

        look: is called with each node of the graph. Raises its errors, and those of the callback.
        """
        self.before_pass(shape)
        self._abandon()  # what features know of the rows in these cells
        self._look = look
        with self._computing_nothing(None):
            yield

    @contextlib.contextmanager
    def _computing_nothing(self, seen: list[Node] | None) -> Iterator[None]:
        self._is_mapping, self._seen, self._failure, self._quiet = True, seen, None, _EMPTY.quiet
        self.compute_buffer.forget()
        self.stop.set(False)
        try:
            with self._overhearing():
                yield
        finally:
            self._is_mapping, self._look = False, _only_stop
            self._must_restore = True
            self.stop.set(self.interrupt.is_set)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            if self._copies:
                self._copies.end(is_whole=False)
            raise failure

    def take_map(self) -> GraphMap:
        """Return the graph that was mapped."""
        graph, self._seen = tuple(self._seen or ()), None
        return graph

    def take_flow(self) -> Flow:
        """Return the data flow of the graph that was mapped."""
        flow, self._flow = self._flow, None
        return flow.take() if flow else Flow((), (), ())

    @contextlib.contextmanager
    def running(self, shape: PassShape) -> Iterator[None]:
        """Run one pass of the given shape in this block; at its end, raise the error of the callback, if any."""
        self.before_pass(shape)
        self.compute_buffer.forget()
        is_guessed = shape not in self.programs
        self._program = self._guess(shape) if is_guessed else self.programs[shape]
        self._cursor, self._seen, self._failure, self._quiet = 0, None, None, _EMPTY.quiet
        try:
            with self._overhearing():
                yield
        except BaseException:
            self._abandon()
            self._must_restore = True  # a pass that was stopped has not restored what the one before left out
            raise
        self._must_restore = self._failure is not None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            self._abandon()
            if is_guessed and not isinstance(failure, Cancelled):  # which says nothing of the guess
                self.programs[shape] = _EMPTY  # node by node next time: a wrong guess may hold more than has room
            raise failure
        if self._copies:
            self._copies.end(is_whole=True)
        if self._seen is None and 0 < self._cursor < len(self._program.graph):
            self._abandon()  # the graph ended in the middle of what was expected: what is held there is not released
            self._check_known("its end")
            self._seen = list(self._program.graph[: self._cursor])
        if self._seen is not None:
            self._program = self._program_of(tuple(self._seen))
        if not self.is_partial and self.programs.pop(shape, None) is None and len(self.programs) >= MOST_PROGRAMS:
            del self.programs[next(iter(self.programs))]  # of the shape that was used the longest ago
        self.programs[shape], self._cursor, self.expects_shift = self._program, 0, False  # nothing of the next is done

    def _abandon(self) -> None:
        for feature in self.features:
            feature.abandon()
        if self._copies:
            self._copies.end(is_whole=False)

    def _overhearing(self) -> contextlib.AbstractContextManager[None]:
        return ggml.log.overhearing(self._cuts.hear) if self._cuts else contextlib.nullcontext()

    def _guess(self, shape: PassShape) -> Program:
        met = [(known, program) for known, program in reversed(self.programs.items()) if program.graph]
        alike = (program for known, program in met if known.kind == shape.kind)
        return next(alike, None) or next((program for _, program in met), _EMPTY)

    def _program_of(self, graph: GraphMap) -> Program:
        splits = self._cuts.splits() if self._cuts else ()
        known = (program for program in self.programs.values() if program.graph == graph and program.splits == splits)
        return next(known, None) or compile_program(graph, self.features, splits)

    def _ask(self, address: int) -> bool:
        self.interrupt.check()
        if self.expects_shift and not self.compute_buffer.size_bytes:  # keys are turned where they lie
            return False
        program, i = self._program, self._cursor
        if self._seen is None and i == len(program.graph):
            i = 0  # llama.cpp has cut the batch: the same graph once more
        if i == 0 and self._cuts and self._seen is None:
            program = self._cut_alike(self._cuts.splits())
        node = program.graph[i] if self._seen is None and i < len(program.graph) else None
        if node and ggml.settle(address, node.name, node.is_computed):
            self._cursor = i + 1
            if self.compute_buffer.size_bytes and not self._cuts:
                self._quiet = program.quiet
            for step in program.before[i]:
                step(address)
            return self._ends_part(i) or bool(program.after[i])
        self._quiet = _EMPTY.quiet
        return self._ask_unknown(address)

    def _cut_alike(self, splits: tuple[Split, ...]) -> Program:
        """Return a program whose splits are `splits`, the expected one if it has these."""
        if self._program.splits != splits:
            self._program = next((known for known in self.programs.values() if known.splits == splits), _EMPTY)
            self._cursor = 0
        return self._program

    def _ends_part(self, ordinal: int) -> bool:
        """Return whether the pass stops after node `ordinal` because weights are copied next."""
        self._at = ordinal
        return self._cuts is not None and self._cuts.is_border(ordinal + 1)

    def _ask_unknown(self, address: int) -> bool:
        self._check_known(ggml.tensor_name(address).decode("utf-8", "replace"))
        if self._must_restore:
            ggml.set_compute_flag(address, True)
        if self._seen is None:
            self._seen = list(self._program.graph[: self._cursor])
        node = self._note(address, self._seen)
        self._pending = [feature for feature in self.features if feature.before_unknown(node, address)]
        return self._ends_part(self._at) or bool(self._pending)

    def _note(self, address: int, seen: list[Node]) -> Node:
        """Observe the node at `address`, and append it to `seen`."""
        node = self.observer.observe(address, seen)
        self._at = self._at + 1 if seen and node.name != seen[0].name else 0  # again: llama.cpp has cut the batch
        if self._cuts:
            self._cuts.splits()
            if self._cuts.is_border(self._at):
                node = replace(node, is_border=True)
        seen.append(node)
        return node

    def _check_known(self, where: str) -> None:
        if self.is_partial:
            raise GraphChanged(f"llama.cpp's graph is not the one that was spread over devices, at {where}")

    def _told(self, address: int) -> bool:
        if self._seen is not None:
            pending, self._pending = self._pending, []
            for feature in pending:
                feature.after_unknown()
        else:
            for step in self._program.after[self._cursor - 1]:
                step(address)
        if self._copies:
            self._copies.cross(self._at + 1)
        return True

    def _skip(self, address: int) -> bool:
        if self._is_mapping and self._failure is None:
            if self._seen is not None:
                self._note(address, self._seen)
            self._look(address)
        ggml.set_compute_flag(address, False)
        return False

    def _fail(self, error: BaseException, address: int) -> None:
        self._failure, self._quiet = self._failure or error, _EMPTY.quiet
        ggml.set_compute_flag(address, False)
        if self._copies:
            self._copies.give_up()


_EMPTY = Program((), (), ())

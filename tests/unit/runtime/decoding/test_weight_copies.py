"""What a scheduler copies to a GPU: read from its log, brought before it copies, in a driver that stops for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from edge_run.base.errors import NotSupported, TierReadError
from edge_run.runtime.decoding.driver import Driver, PassShape, compile_program
from edge_run.runtime.decoding.weight_copies import CopySchedule, WeightCopies
from edge_run.runtime.graph.nodes import WeightRead
from edge_run.runtime.graph.scheduler_splits import Split, SplitAccount
from graph_runs import Feature, Graph, compute, driver_for

MANY, ONE = PassShape(64, 0), PassShape(1, 1)
LOG = (
    b"\n## SPLIT #0: CPU # 0 inputs",
    b"\n",
    b"node #  0 (  GET_ROWS):                 embd (   8K) [  CPU         ] use=1,c=1:",
    b"     token_embd.weight (   2M) [  CPU         ]",
    b"\n",
    b"\n## SPLIT #1: Vulkan0 # 2 inputs",
    b": ",
    b"[embd (   8K)] ",
    b"[blk.0.attn_q.weight (  16K)] ",
    b"\n",
    b"node #  2 (   MUL_MAT):               Qcur-0 (   8K) [Vulka         ] use=1,c=1:",
    b" Vulkan0#blk.0.attn_q (  16K) [ NULL         ]",
    b"\n",
    b"\n## SPLIT #2: CPU # 1 inputs",
    b": ",
    b"[cache_k_l0 (view) (permuted) (   8K)] ",
    b"\n",
    b"node # 11 (   MUL_MAT):               kq-0 (   8K) [  CPU         ] use=1,c=1:",
    b"\n",
)


def told(*splits: tuple[int, str, tuple[str, ...]]) -> list[bytes]:
    """The log of a graph that is cut like that."""
    lines: list[bytes] = []
    for number, (first, device, inputs) in enumerate(splits):
        lines += [f"\n## SPLIT #{number}: {device} # {len(inputs)} inputs".encode(), b": " if inputs else b""]
        lines += [*(f"[{name} (   1K)] ".encode() for name in inputs), b"\n"]
        lines += [f"node #{first:3d} (       ADD):                    x (   1K) [  CPU         ] use=1,c=1:".encode()]
    return lines


class Carrier:
    """Notes what is done about copies. is_brief: and not with which weights."""

    def __init__(self, note: Callable[[str], None], *, is_brief: bool = False) -> None:
        self._note, self._is_brief = note, is_brief

    def bring(self, reads: Sequence[WeightRead]) -> None:
        self._note(" ".join(["bring", *(read.name for read in reads if not self._is_brief)]))

    def let_go(self, reads: Sequence[WeightRead]) -> None:
        self._note(" ".join(["let go", *(read.name for read in reads if not self._is_brief)]))

    def expose(self) -> None:
        self._note("expose")

    def hide(self) -> None:
        self._note("hide")


def schedule_of(*names: str) -> CopySchedule:
    return CopySchedule({name.encode(): WeightRead(name, 0, 1, is_copied=True) for name in names})


def hear(schedule: CopySchedule, *splits: tuple[int, str, tuple[str, ...]]) -> None:
    for line in told(*splits):
        schedule.hear(line)


def test_the_log_says_where_a_graph_is_cut_and_what_is_copied() -> None:
    account = SplitAccount()
    for piece in (*LOG, b"something else\n"):
        account.hear(piece)
    assert account.splits == (
        Split(0, "CPU", ()),
        Split(2, "Vulkan0", (b"embd", b"blk.0.attn_q.weight")),
        Split(11, "CPU", (b"cache_k_l0 (view) (permuted)",)),
    )
    before = account.splits
    assert account.splits is before
    for piece in LOG[:5]:
        account.hear(piece)
    assert account.splits == (Split(0, "CPU", ()),)
    assert account.n_told == 2


def test_weights_are_brought_at_the_end_of_the_part_before_and_let_go_at_the_end_of_their_own() -> None:
    schedule, events = schedule_of("w1", "w2"), list[str]()
    copies = WeightCopies(schedule, Carrier(events.append))
    hear(schedule, (0, "CPU", ()), (2, "GPU", ("x", "w1")), (5, "GPU", ("w2",)), (6, "CPU", ("y",)), (8, "GPU", ("z",)))
    schedule.splits()
    assert [i for i in range(10) if schedule.is_border(i)] == [2, 5, 6]
    for ordinal in range(10):
        copies.cross(ordinal)
    assert events == ["bring w1", "let go w1", "bring w2", "let go w2"]
    copies.end(is_whole=True)
    assert len(events) == 4


def test_what_the_last_part_copies_is_let_go_at_the_end_of_the_pass() -> None:
    schedule, events = schedule_of("w1"), list[str]()
    copies = WeightCopies(schedule, Carrier(events.append))
    hear(schedule, (0, "CPU", ()), (2, "GPU", ("w1",)))
    schedule.splits()
    copies.cross(2)
    copies.end(is_whole=True)
    assert events == ["bring w1", "let go w1"]


@pytest.mark.parametrize("splits", [(), ((0, "GPU", ("w1",)),)], ids=["nothing is said", "copied at once"])
def test_where_it_cannot_be_known_in_time_it_is_refused(splits: tuple[tuple[int, str, tuple[str, ...]], ...]) -> None:
    schedule = schedule_of("w1")
    hear(schedule, *splits)
    with pytest.raises(NotSupported, match="give op_offload=False"):
        schedule.splits()


NAMES = ("a", "b", "g", "w1", "c")


def followed(feature: Feature, graph: Graph) -> tuple[Driver, CopySchedule]:
    """A driver whose pass stops for copies, which are noted with all else that happens."""
    driver = driver_for(feature, graph)
    observer = driver.observer
    schedule = schedule_of("w9")
    driver.follow_cuts(schedule)
    driver.follow_copies(WeightCopies(schedule, Carrier(feature.note, is_brief=True)))
    driver.observer = observer
    return driver, schedule


def run(driver: Driver, feature: Feature, graph: Graph, shape: PassShape = MANY) -> list[str]:
    feature.events.clear()
    with driver.running(shape):
        compute(driver, feature, graph)
    return list(feature.events)


def test_a_pass_stops_for_copies_in_a_graph_that_is_known_or_not() -> None:
    """It stops after b, where the part ends that comes before; and again where that of the copies does."""
    graph, feature = Graph(NAMES), Feature()
    driver, schedule = followed(feature, graph)
    hear(schedule, (0, "CPU", ()), (2, "GPU", ("w9",)), (3, "CPU", ()))
    assert run(driver, feature, graph) == ["a", "b", "bring", "g", "let go", "meet w1", "w1", "part", "c"]
    assert run(driver, feature, graph) == ["a", "b", "bring", "g", "let go", "take w1", "w1", "give w1", "c"]
    program = driver.programs[MANY]
    assert [node.is_border for node in program.graph] == [False, False, True, True, False]


def test_a_graph_with_the_same_nodes_that_is_cut_otherwise_is_another() -> None:
    """A pass of few tokens has the same nodes, and computes them elsewhere."""
    graph, feature = Graph(NAMES), Feature()
    driver, schedule = followed(feature, graph)
    whole, part = [(0, "CPU", ())], [(0, "CPU", ()), (2, "GPU", ("w9",)), (3, "CPU", ())]
    hear(schedule, *whole)
    known = ["a", "b", "g", "take w1", "w1", "give w1", "c"]
    run(driver, feature, graph, ONE)
    assert sorted(run(driver, feature, graph, ONE)) == sorted(known)
    hear(schedule, *part)
    assert "bring" in run(driver, feature, graph)
    assert "meet w1" in feature.events
    hear(schedule, *whole)
    assert sorted(run(driver, feature, graph, ONE)) == sorted(known)
    hear(schedule, *part)
    assert "meet w1" not in run(driver, feature, graph)


def test_after_a_failure_all_that_is_still_copied_can_be_read() -> None:
    """llama.cpp goes on to the end of the graph, whatever it is told."""
    graph, feature = Graph(NAMES), Feature()
    driver, schedule = followed(feature, graph)
    hear(schedule, (0, "CPU", ()), (2, "GPU", ("w9",)), (3, "CPU", ()))

    def fail(event: str) -> None:
        if event == "bring":
            raise TierReadError("the drive is gone")

    feature.on_event = fail
    with pytest.raises(TierReadError):
        run(driver, feature, graph)
    assert feature.events == ["a", "b", "bring", "expose", "abandon", "hide"]
    feature.on_event = lambda event: None
    assert run(driver, feature, graph)[:5] == ["a", "b", "bring", "g", "let go"]


def test_a_batch_that_is_cut_brings_its_copies_each_time() -> None:
    graph, feature = Graph(NAMES), Feature()
    driver, schedule = followed(feature, graph)
    hear(schedule, (0, "CPU", ()), (2, "GPU", ("w9",)), (3, "CPU", ()))
    for _ in range(2):
        feature.events.clear()
        with driver.running(MANY):
            compute(driver, feature, graph)
            compute(driver, feature, graph)
        assert feature.events.count("bring") == feature.events.count("let go") == 2
        driver.programs[MANY] = compile_program(graph.map, driver.features, schedule.splits())

"""The driver against a stand-in for llama.cpp's scheduler: what is computed, when steps run, what a failure leaves."""

from __future__ import annotations

import pytest

from edge_run.base.errors import BudgetError, Cancelled, TierReadError
from edge_run.runtime.decoding.driver import MOST_PROGRAMS, Driver, PassShape, Steps, compile_program
from edge_run.runtime.graph.nodes import GraphMap
from edge_run.runtime.llama import _ggml as ggml
from graph_runs import Feature, Graph, compute, driver_for

ONE = PassShape(1, 1)
MANY = PassShape(64, 0)


@pytest.fixture
def feature() -> Feature:
    return Feature()


def run(driver: Driver, feature: Feature, graph: Graph, shape: PassShape = ONE) -> list[str]:
    """Run one pass; return what happened in it, in order."""
    feature.events.clear()
    with driver.running(shape):
        compute(driver, feature, graph)
    return list(feature.events)


SMALL = ("a", "w1", "b", "w2", "c")
STEP_BY_STEP = ["meet w1", "a", "w1", "part", "meet w2", "b", "w2", "part", "c"]
BY_PROGRAM = ["take w1", "a", "w1", "give w1", "take w2", "b", "w2", "give w2", "c"]


def test_an_unknown_graph_is_met_node_by_node_and_known_from_then_on(feature: Feature) -> None:
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)
    observer = driver.observer
    assert run(driver, feature, graph) == STEP_BY_STEP
    n_looks = observer.n_looks  # type: ignore[attr-defined]
    assert n_looks == len(SMALL)
    assert run(driver, feature, graph) == BY_PROGRAM
    assert observer.n_looks == n_looks, "a graph that is known is not looked at again"  # type: ignore[attr-defined]


def test_another_shape_with_the_same_graph_needs_no_second_look(feature: Feature) -> None:
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)
    run(driver, feature, graph, ONE)
    assert run(driver, feature, graph, MANY) == BY_PROGRAM
    assert driver.programs[ONE] is driver.programs[MANY]


def test_programs_are_known_of_the_shapes_that_were_used_last(feature: Feature) -> None:
    """Those of a server that is busy for months are thousands; what is forgotten is guessed."""
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)
    run(driver, feature, graph, ONE)
    for tokens in range(2, 3 * MOST_PROGRAMS):
        run(driver, feature, graph, PassShape(tokens, tokens))
        assert run(driver, feature, graph, ONE) == BY_PROGRAM
        assert len(driver.programs) <= MOST_PROGRAMS
    assert PassShape(2, 2) not in driver.programs
    assert PassShape(3 * MOST_PROGRAMS - 1, 3 * MOST_PROGRAMS - 1) in driver.programs
    assert run(driver, feature, graph, PassShape(2, 2)) == BY_PROGRAM


def test_from_the_first_node_that_is_not_the_expected_one_it_goes_on_node_by_node(feature: Feature) -> None:
    graph, other = Graph(SMALL), Graph(("a", "w1", "x", "w2", "c"))
    driver = driver_for(feature, graph, other)
    run(driver, feature, graph, ONE)
    met = run(driver, feature, other, MANY)
    assert met == ["take w1", "a", "w1", "give w1", "meet w2", "x", "w2", "part", "c"]
    assert run(driver, feature, other, MANY) == [*BY_PROGRAM[:5], "x", "w2", "give w2", "c"]
    assert run(driver, feature, graph, ONE) == BY_PROGRAM


def test_a_graph_that_goes_on_longer_than_expected(feature: Feature) -> None:
    short, long = Graph(SMALL[:3]), Graph(SMALL)
    driver = driver_for(feature, short, long)
    run(driver, feature, short)
    assert run(driver, feature, long, MANY) == [*BY_PROGRAM[:4], "meet w2", "b", "w2", "part", "c"]
    assert run(driver, feature, long, MANY) == BY_PROGRAM


def test_a_graph_that_ends_sooner_than_expected_holds_nothing_afterwards(feature: Feature) -> None:
    """What was taken at its last stop but one would be held for good, and its frames missing from then on."""
    long, short = Graph(SMALL), Graph(SMALL[:3])
    driver = driver_for(feature, long, short)
    run(driver, feature, long)
    assert run(driver, feature, short, MANY)[-1] == "abandon"
    assert run(driver, feature, short, MANY) == [*BY_PROGRAM[:4], "b"]
    assert run(driver, feature, long) == BY_PROGRAM


def test_a_batch_that_llama_cpp_cuts_runs_the_same_program_again(feature: Feature) -> None:
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)
    run(driver, feature, graph)
    feature.events.clear()
    with driver.running(ONE):
        compute(driver, feature, graph)
        compute(driver, feature, graph)
    assert feature.events == BY_PROGRAM * 2


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
@pytest.mark.parametrize("step", range(4))
def test_after_a_failure_nothing_more_is_computed_and_the_next_pass_is_whole(
    feature: Feature, step: int, is_known: bool
) -> None:
    """Failing in each step in turn. Nodes that were asked about before it are computed: what they read is held."""
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)
    if is_known:
        run(driver, feature, graph)
    whole = BY_PROGRAM if is_known else STEP_BY_STEP
    steps = [i for i, event in enumerate(whole) if event not in SMALL]
    failing, until = step, steps[step]

    def fail(event: str) -> None:
        nonlocal failing
        failing -= 1
        if failing == -1:
            raise TierReadError(f"in step {step}")

    feature.on_event = fail
    with pytest.raises(TierReadError, match=f"in step {step}"):
        run(driver, feature, graph)
    is_in_mid_segment = whole[until] in ("take w1", "take w2", "meet w1", "meet w2")
    assert feature.events == [*whole[: until + 1], *(whole[until + 1 : until + 2] * is_in_mid_segment), "abandon"]
    feature.on_event = lambda event: None
    assert run(driver, feature, graph) == whole
    assert run(driver, feature, graph) == BY_PROGRAM


def test_whatever_is_raised_is_raised_after_the_pass_and_never_inside(feature: Feature) -> None:
    """An exception in a ctypes callback is printed and forgotten, and computing goes on over missing bytes."""
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)

    class Odd(BaseException):
        pass

    def explode(event: str) -> None:
        if event == "meet w2":
            raise Odd

    feature.on_event = explode
    with pytest.raises(Odd):
        run(driver, feature, graph)
    assert feature.events[-1] == "abandon"


def test_a_guess_that_holds_too_much_is_not_made_again(feature: Feature) -> None:
    """It held a segment of the expected graph when the unexpected one needed more: node by node there is room."""
    graph, other = Graph(SMALL), Graph(("a", "w1", "w3", "b"))
    driver = driver_for(feature, graph, other)
    driver.programs[ONE] = compile_program(graph.map, [_OneSegment(feature)])

    def refuse(event: str) -> None:
        if event == "meet w3" and feature.events[0] == "take all":
            raise BudgetError("no room")

    feature.on_event = refuse
    with pytest.raises(BudgetError):
        run(driver, feature, other, MANY)
    assert run(driver, feature, other, MANY) == ["meet w1", "a", "w1", "part", "meet w3", "w3", "part", "b"]
    assert run(driver, feature, other, PassShape(32, 0)) == [
        "take w1",
        "a",
        "w1",
        "give w1",
        "take w3",
        "w3",
        "give w3",
        "b",
    ]


class _OneSegment(Feature):
    """Holds everything from the first weight to the last."""

    def __init__(self, feature: Feature) -> None:
        self.feature = feature

    def register(self, graph: GraphMap, steps: Steps) -> None:
        weights = [i for i, node in enumerate(graph) if node.reads]
        steps.add_before(weights[0], lambda _: self.feature.note("take all"))
        steps.add_after(weights[-1], lambda _: self.feature.note("give all"))


LONG = ("a", "b", "w1", "c", "d", "e")


@pytest.mark.parametrize("knows_buffer", [False, True])
@pytest.mark.parametrize("other", [i for i, name in enumerate(LONG) if not name.startswith("w")])
def test_another_node_is_noticed_wherever_it_is(feature: Feature, other: int, knows_buffer: bool) -> None:
    """Where nothing is to be done, too: the pass goes on node by node, and computes all of them."""
    names = (*LONG[:other], "x", *LONG[other + 1 :])
    graph, changed = Graph(LONG), Graph(names)
    driver = driver_for(feature, graph, changed, knows_buffer=knows_buffer)
    run(driver, feature, graph)
    taken, met = ["take w1", *LONG[:3], "give w1"], ["meet w1", *names[:3], "part"]
    first = taken if other > 2 else met
    assert run(driver, feature, changed, MANY) == [*first, *names[3:]]
    assert run(driver, feature, graph) == [*taken, *LONG[3:]]


@pytest.mark.parametrize("is_cancelled_in", LONG)
def test_cancelling_in_a_known_graph_ends_the_pass_at_its_next_node(feature: Feature, is_cancelled_in: str) -> None:
    """What was asked about before is computed: what it reads is held."""
    graph = Graph(LONG)
    driver = driver_for(feature, graph)
    run(driver, feature, graph)
    feature.events.clear()

    def ask(address: int, is_asking: bool, data: int) -> bool:
        if is_asking and ggml.tensor_name(address).decode() == is_cancelled_in:
            driver.interrupt.cancel()
        return answer(address, is_asking, data)

    answer, driver.callback = driver.callback, ask  # type: ignore[method-assign]
    with pytest.raises(Cancelled), driver.running(ONE):
        compute(driver, feature, graph)
    computed = [name for name in feature.events if name in LONG]
    assert computed == list(LONG[: LONG.index(is_cancelled_in)])


def test_cancelling_ends_the_pass_at_its_next_node(feature: Feature) -> None:
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)
    feature.on_event = lambda event: driver.interrupt.cancel() if event == "part" else None
    with pytest.raises(Cancelled):
        run(driver, feature, graph)
    assert feature.events == ["meet w1", "a", "w1", "part", "abandon"]


def test_a_guess_is_made_again_where_its_pass_was_cancelled(feature: Feature) -> None:
    """A device that computes some layers goes on node by node nowhere: all would be computed again for that."""
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)
    run(driver, feature, graph)
    feature.on_event = lambda event: driver.interrupt.cancel() if event == "take w2" else None
    with pytest.raises(Cancelled):
        run(driver, feature, graph, MANY)
    feature.on_event = lambda event: None
    driver.interrupt.reset()
    driver.is_partial = True
    assert run(driver, feature, graph, MANY) == BY_PROGRAM


def test_mapping_computes_nothing_and_sees_everything(feature: Feature) -> None:
    graph = Graph(SMALL)
    driver = driver_for(feature, graph)
    with driver.mapping():
        compute(driver, feature, graph)
    assert feature.events == []
    assert driver.take_map() == graph.map
    assert run(driver, feature, graph) == STEP_BY_STEP


def test_what_goes_wrong_while_mapping_is_raised(feature: Feature) -> None:
    graph = Graph(SMALL)
    driver = driver_for(feature, Graph(SMALL[:2]))
    with pytest.raises(KeyError), driver.mapping():
        compute(driver, feature, graph)
    assert feature.events == []


def test_a_node_that_llama_cpp_does_not_compute_is_not_computed_after_a_map_either(feature: Feature) -> None:
    graph = Graph(SMALL, uncomputed=("b",))
    driver = driver_for(feature, graph)
    with driver.mapping():
        compute(driver, feature, graph)
    driver.programs[ONE] = compile_program(driver.take_map(), driver.features)
    assert run(driver, feature, graph) == [event for event in BY_PROGRAM if event != "b"]

"""Cuts of networks that are names and sizes only."""

from edge_run.partition.cuts import Network, Operation, find_cuts, multiply_adds, operations_between, peak_bytes


def network(*operations: tuple[str, str], outputs: str = "z") -> Network:
    """Return a network from x; an operation is `inputs > outputs`, names are letters."""
    made = tuple(Operation("op", tuple(inputs), tuple(ends), 10) for inputs, ends in operations)
    return Network(("x",), tuple(outputs), made)


CHAIN = network(("xw", "a"), ("a", "b"), ("b", "z"))
RESIDUAL = network(("x", "a"), ("a", "b"), ("b", "c"), ("ac", "d"), ("d", "z"))


def test_every_link_of_a_chain_is_a_cut_and_the_output_is_none() -> None:
    assert find_cuts(CHAIN) == ["x", "a", "b"]


def test_no_cut_goes_through_a_residual_link() -> None:
    assert find_cuts(RESIDUAL) == ["x", "a", "d"]


def test_order_of_branches_does_not_matter() -> None:
    first = network(("x", "a"), ("a", "b"), ("a", "c"), ("bc", "d"), ("d", "z"))
    second = network(("x", "a"), ("a", "c"), ("a", "b"), ("bc", "d"), ("d", "z"))
    assert find_cuts(first) == find_cuts(second) == ["x", "a", "d"]


def test_constants_do_not_hinder_a_cut() -> None:
    assert find_cuts(network(("", "k"), ("x", "a"), ("ak", "b"), ("bk", "z"))) == ["x", "a", "b"]


def test_an_output_in_the_middle_ends_the_cuts() -> None:
    assert find_cuts(network(("x", "a"), ("a", "y"), ("y", "b"), ("b", "z"), outputs="yz")) == ["x", "a"]


def test_two_results_of_one_operation_are_no_cut() -> None:
    assert find_cuts(network(("x", "ab"), ("ab", "c"), ("c", "z"))) == ["x", "c"]


def test_what_nobody_reads_is_no_hindrance() -> None:
    assert find_cuts(network(("x", "a"), ("a", "bu"), ("b", "z"))) == ["x", "a", "b"]


def test_halves_hold_each_operation_once() -> None:
    for cut in find_cuts(RESIDUAL):
        halves = operations_between(RESIDUAL, None, cut) + operations_between(RESIDUAL, cut, None)
        assert sorted(halves) == list(range(5))


def test_constants_go_to_both_halves_that_read_them() -> None:
    both = network(("", "k"), ("xk", "a"), ("ak", "z"))
    assert operations_between(both, None, "a") == [0, 1]
    assert operations_between(both, "a", None) == [0, 2]


def test_peak_counts_what_is_alive_together() -> None:
    sizes = {"x": 1, "a": 10, "b": 100, "c": 1000, "d": 10000, "z": 1}
    assert peak_bytes(RESIDUAL, range(5), "z", sizes) == 10 + 1000 + 10000
    assert peak_bytes(RESIDUAL, operations_between(RESIDUAL, None, "a"), "a", sizes) == 11
    assert peak_bytes(RESIDUAL, operations_between(RESIDUAL, "d", None), "z", sizes) == 10001


def test_multiply_adds_add_up() -> None:
    assert multiply_adds(RESIDUAL, [0, 3]) == 20

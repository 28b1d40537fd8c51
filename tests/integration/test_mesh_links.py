"""Links of measured speed: how they are measured, and that a plan goes by them."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

import namespaces
from edge_run.base.config import ModelConfig
from edge_run.base.errors import MeshError
from edge_run.base.fields import Document
from edge_run.base.mesh import LinkRate
from edge_run.devices.link.connection import Peer
from edge_run.devices.link.data_link import DataLink
from edge_run.runtime.mesh import coordinator
from edge_run.runtime.mesh import links as links_module
from edge_run.runtime.mesh.engine import open_mesh_engine
from edge_run.runtime.mesh.links import (
    UNREACHED_S,
    USUAL_RATE,
    GiveEach,
    Measured,
    MeasuredLinks,
    measure_links,
    measured_document,
    read_measured,
)
from fake_mesh import Hub
from in_child import in_child
from mesh_processes import mesh_of
from mosquitto import PROGRAM
from program import MESH, fork_from_here
from slow_relay import relay
from tiny_models import make_model


def measuring(hub: Hub, given: list[str], failing: Collection[str] = ()) -> GiveEach:
    """Return what has devices measure their links; `given` gets who was asked, and `failing` do not obey."""

    def give_each(orders: dict[str, Document], timeout_s: float) -> tuple[dict[str, Document], dict[str, Exception]]:
        given.extend(orders)
        answers = {
            node: measured_document(measure_links(hub.members[node], list(map(str, order["nodes"])), timeout_s, 0))  # type: ignore[arg-type]
            for node, order in orders.items()
            if node not in failing
        }
        return answers, {node: MeshError(f"{node} fails") for node in orders if node in failing}

    return give_each


@pytest.mark.alone
@pytest.mark.parametrize("mbits", [1, 20])
def test_a_slow_link_is_measured_in_a_second_or_so(mbits: int) -> None:
    with (
        contextlib.closing(DataLink()) as a,
        contextlib.closing(DataLink()) as b,
        relay(b.port, mbits / 8 * 1e6) as port,
    ):
        a.set_peers({"b": Peer("b", "1", b.key, (f"tcp://127.0.0.1:{port}",))})
        b.set_peers({"a": Peer("a", "1", a.key, (f"tcp://127.0.0.1:{a.port}",))})
        rates = list[LinkRate]()

        def is_right() -> bool:
            """A measurement that others disturb, which want the cores too, is made again."""
            started = time.monotonic()
            rates.append(a.measure("b", timeout_s=60))
            is_quick = time.monotonic() - started < 3
            return is_quick and rates[-1].bytes_per_s == pytest.approx(mbits / 8 * 1e6, rel=0.3)

        assert any(is_right() for _ in range(5)), rates
        assert a.measure("b", timeout_s=0, fresh_s=60) is rates[-1], "it was just measured"
        assert a.measure("b", timeout_s=60) is not rates[-1]


def test_links_are_measured_once_in_a_run_and_answers_are_checked() -> None:
    hub = Hub()
    here, _, _ = (hub.join(node) for node in "abc")
    hub.rates = {pair: LinkRate("", 0.002, 1e6 * i) for i, pair in enumerate(itertools.permutations("abc", 2), 1)}
    given: list[str] = []

    links = MeasuredLinks(here, measuring(hub, given), 16384)
    assert links.rate("a", "b") is USUAL_RATE
    links.measure("abc")
    assert sorted(given) == ["b", "c"]
    for pair, rate in hub.rates.items():
        assert links.rate(*pair).bytes_per_s == rate.bytes_per_s
        assert links.hop(*pair).token_s == pytest.approx(links.handling_s + 0.001 + 16384 / rate.bytes_per_s)
    links.measure("abc")
    assert sorted(given) == ["b", "c"], "nobody is asked twice"
    before = links.hop("a", "b").token_s
    links.correct("abba", before + 0.5)
    assert sorted(given) == ["b", "b", "c"], "hops that take longer than expected are measured anew"
    assert links.hop("a", "b").token_s > before + 0.4


def test_where_a_device_fails_what_others_measured_counts_and_it_is_asked_again() -> None:
    hub, given, failing = Hub(), list[str](), ["c"]
    here, _, _ = (hub.join(node) for node in "abc")
    hub.rates = {pair: LinkRate("", 0.002, 1e6 * i) for i, pair in enumerate(itertools.permutations("abc", 2), 1)}
    links = MeasuredLinks(here, measuring(hub, given, failing), 16384)
    with pytest.raises(MeshError, match="c fails"):
        links.measure("abc")
    for pair in (("a", "b"), ("a", "c"), ("b", "a"), ("b", "c")):
        assert links.rate(*pair).bytes_per_s == hub.rates[pair].bytes_per_s
    failing.clear()
    links.measure("abc")
    assert sorted(given) == ["b", "c", "c"]
    assert links.rate("c", "a").bytes_per_s == hub.rates["c", "a"].bytes_per_s


def test_a_link_that_failed_in_a_pass_is_no_hop() -> None:
    hub, given = Hub(), list[str]()
    here, _, _ = (hub.join(node) for node in "abc")
    links = MeasuredLinks(here, measuring(hub, given), 16384)
    links.measure("abc")
    links.note_apart("b", "c")
    links.measure("abc")
    assert sorted(given) == ["b", "c"]
    assert links.apart("abca") == ("b", "c")
    assert links.apart("acba") is None
    assert links.hop("b", "c").token_s == UNREACHED_S


def test_a_link_that_failed_in_a_pass_is_measured_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a device that plans do without for its sake would be of no use until something else changed."""
    hub, given = Hub(), list[str]()
    here, _, _ = (hub.join(node) for node in "abc")
    hub.rates = {pair: LinkRate("", 0.002, 1e6) for pair in itertools.permutations("abc", 2)}
    links = MeasuredLinks(here, measuring(hub, given), 16384)
    links.measure("abc")
    links.note_apart("b", "c")
    monkeypatch.setattr(links_module, "APART_S", 0.0)
    links.measure("abc")
    assert sorted(given) == ["b", "b", "c"]
    assert links.apart("abca") is None


def test_answers_of_other_devices_are_checked() -> None:
    bad = {"x": [1], "y": [True, 2], "z": [-1, 2], "w": "1,2", "v": [1, float("nan")]}
    assert read_measured({"links": bad, "unreached": ["x"]}) == Measured({}, {})
    assert read_measured({"links": 5, "unreached": 5}) == Measured({}, {})
    assert len(read_measured({"unreached": {"x": 1000 * "y"}}).unreached["x"]) < 1000
    found = Measured({"x": LinkRate("", 0.5, 1e6)}, {"y": "nothing listens there"})
    assert read_measured(measured_document(found)) == found


def test_a_link_on_which_nobody_answers_is_no_hop_until_its_device_comes_anew() -> None:
    hub = Hub()
    here, _, _ = (hub.join(node) for node in "abc")
    hub.rates = {pair: LinkRate("", 0.002, 1e6) for pair in itertools.permutations("abc", 2)}
    hub.unreached = {("b", "a"): "tcp://127.0.0.1:7: nothing listens there", ("c", "b"): "does not answer"}

    links = MeasuredLinks(here, measuring(hub, []), 16384)
    links.measure("abc")
    assert "it does not reach this device's data link (127.0.0.1:7: nothing listens there); " in links.why_apart("b")
    assert links.why_apart("c") == ""
    assert links.hop("c", "b").token_s == UNREACHED_S
    assert links.hop("b", "c").token_s < 1
    hub.unreached = {("a", "c"): "does not answer"}
    links.measure("abc")
    assert links.why_apart("b"), "it was tried"
    for node in "bc":
        links.forget(node)
    links.measure("abc")
    assert links.why_apart("b") == ""
    assert "its data link is not reached from here (does not answer)" in links.why_apart("c")
    assert links.hop("c", "b").token_s < 1


@pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there can be namespaces")
@pytest.mark.skipif(PROGRAM is None, reason="mosquitto is not installed")
@in_child
def test_a_device_behind_a_slow_link_is_left_out(folder: Path, tmp_path: Path) -> None:
    """Each of three has room for half; what one more would hold is less to read than its link takes."""
    fork_from_here(MESH)
    path = make_model("llama", folder)
    real = coordinator.plan_ring

    def cramped(works, specs, hops):  # type: ignore[no-untyped-def]
        room = sum(work.weight_bytes + work.kept_bytes for work in works) * 55 // 100
        return real(works, [replace(s, memory_bytes=room, window_bytes=room // 8) for s in specs], hops)

    coordinator.plan_ring = cramped
    with namespaces.network(["near", "far"]) as net:
        net.shape("far", "2mbit")
        with mesh_of(tmp_path, path, ["near", "far"], net) as mesh:
            here = mesh.join()
            mesh.wait_for(here, 2)
            config = ModelConfig(memory="4GiB", context_tokens=256, threads=1, check_file=False)
            engine = open_mesh_engine(path, dataclasses.replace(config, chunk_bytes=16384), here)
            with contextlib.closing(engine):
                use = engine.mesh_use
                assert use is not None
                assert [node.name for node in use.nodes] == ["here", "near"]
                far = next(m.node for m in here.members() if m.name == "far")
                assert 0.2 < here.link.rates()[far].bytes_per_s / (2e6 / 8) < 1.3, "slower where the machine was busy"

"""Fields of documents of others: every number has a range, every text and list a length, and errors say whose."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ProtocolError
from edge_run.base.fields import MOST_BYTES, Fields, plain, shown
from edge_run.runtime.mesh import offers
from edge_run.runtime.mesh.fetch import MeshFetch
from edge_run.runtime.mesh.offers import (
    ANY_NUMERICS,
    IN_FLIGHT,
    SHARED_FIELDS,
    config_from,
    device_spec,
    read_settings,
)
from edge_run.runtime.worker.models import read_asked

NESTED: Any = json.loads("[" * 500 + "]" * 500)
HUGE = 10**4000
WILD: list[Any] = [HUGE, -HUGE, -1, 2**63, 1e300, float("nan"), float("inf"), -float("inf"), True, False, "1", None, "",
        [], [1], {}, {"x": 1}, NESTED, "\x1b[2J", 100_000 * "x"]  # fmt: skip


def room(**fields: Any) -> dict[str, Any]:
    names = ("room_bytes", "compute_bytes_per_s", "disk_bytes_per_s", "window_bytes", "pair_bytes", "range_bytes")
    return {**dict.fromkeys((*names, "least_kept_bytes"), 1000), "least_kept_share": 0.5, **fields}


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": 64 * "a", "name": "m.gguf", "shards": [[1000, 10]], **fields}


def settings(**fields: Any) -> dict[str, Any]:
    usual = {"kv_type": "f16", "flash_attention": "auto", "mesh_activations": "exact", "exact": False}
    return {"settings": {**dict.fromkeys([*SHARED_FIELDS, IN_FLIGHT], 8), ANY_NUMERICS: False, **usual, **fields}}


def lack(answer: dict[str, Any]) -> None:
    MeshFetch(None, 3, print, lambda: None).note("b", answer)  # type: ignore[arg-type]


READERS: dict[str, tuple[Callable[[dict[str, Any]], object], Callable[..., dict[str, Any]], list[str], list[Any]]] = {
    "a room": (lambda answer: device_spec("b", answer), room, list(room()), []),
    "a lack": (lack, lambda **fields: {"missing_bytes": [1, 2, 3], "most_weight_bytes": 5, **fields},
               ["missing_bytes", "most_weight_bytes"], [{"missing_bytes": None}]),
    "a model": (lambda order: read_asked(Fields(order, "an order", "b")), asked, ["model", "shards"], []),
    "settings": (lambda order: read_settings(Fields(order, "an order", "b")), settings,
                 sorted({*SHARED_FIELDS, IN_FLIGHT, ANY_NUMERICS} - {"kv_type", "flash_attention", "mesh_activations"}),
                 [{name: value} for name in ("exact", ANY_NUMERICS) for value in (True, False)]),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_no_reader_takes_what_cannot_be(name: str) -> None:
    read, make, fields, right = READERS[name]
    read(make())
    for field in fields:
        for value in WILD:
            if {field: value} in right:
                continue
            print(name, field, shown(value))
            with pytest.raises(ProtocolError) as caught:
                read(make(**{field: value}))
            assert len(str(caught.value)) < 400
            assert str(caught.value).isprintable()


@pytest.mark.parametrize("shards", [[[1, 2]], [[0, 0]], [[True, True]], [[HUGE, 1]], [[5, 1], [MOST_BYTES, 1]],
                                    [[1 << 38, 1 << 38]], [[1 << 30, 1 << 29]] * 2,
                                    [[5]], [[5, 1, 1]], [[5.0, 1]], [5], [[5, 1]] * 5000, ["51"], [None]])  # fmt: skip
def test_no_shards_are_taken_that_cannot_be(shards: Any) -> None:
    with pytest.raises(ProtocolError):
        read_asked(Fields(asked(shards=shards), "an order", "b"))


def test_every_setting_is_asked_for_and_no_other_is_taken() -> None:
    for wild in ({**settings()["settings"], "memory": 1}, {"threads": 1}, {}, [], None, NESTED):
        with pytest.raises(ProtocolError):
            read_settings(Fields({"settings": wild}, "an order", "b"))
    with pytest.raises(ProtocolError, match="different versions, or commits, of edge-run"):
        read_settings(Fields({"settings": {"threads": 1}}, "an order", "b"))


def test_outputs_that_no_pass_has_take_no_memory() -> None:
    found = read_settings(Fields(settings(outputs_per_pass=2**31 - 1), "an order", "b"))
    assert found["outputs_per_pass"] == 8


@pytest.mark.parametrize(
    ("run_threads", "own_threads", "takes_any", "wanted"),
    [(8, None, False, 8), (8, 3, False, 8), (8, None, True, 2), (8, 3, True, 3), (1, None, True, 1), (1, 3, True, 1)],
)
def test_a_device_has_its_own_threads_only_where_tokens_may_differ(
    run_threads: int, own_threads: int | None, takes_any: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "compute_threads", lambda threads: threads or 2)
    order = settings(**{"threads": run_threads, ANY_NUMERICS: takes_any})
    found = read_settings(Fields(order, "an order", "b"))
    assert config_from(found, ModelConfig(threads=own_threads)).threads == wanted


@pytest.mark.parametrize("call", [
    lambda fields: fields.integer("x", 0, 5), lambda fields: fields.number("x", 0, 5), lambda fields: fields.flag("x"),
    lambda fields: fields.name("x", 5), lambda fields: fields.items("x", 1, 2), lambda fields: fields.names("x", 1, 2),
    lambda fields: fields.integers("x", 1, 5), lambda fields: fields.table("x", 1),
    lambda fields: fields.numbers("x", 0, 5),
])  # fmt: skip
def test_errors_name_the_sender_and_are_one_short_line(call: Callable[[Fields], object]) -> None:
    errors = []
    for value in [*WILD, ["\n" * 9], [HUGE, HUGE, HUGE], {"\x1b": 1}, {"a": HUGE}, {"a": 1, "b": 2}]:
        try:
            call(Fields({"x": value}, "a status", "b"))
        except ProtocolError as error:
            errors.append(error)
    assert len(errors) > 15
    assert {error.node for error in errors} == {"b"}
    assert max(len(str(error)) for error in errors) < 300
    assert all(str(error).isprintable() for error in errors)


def test_what_is_for_people_is_one_line_without_anything_that_a_terminal_obeys() -> None:
    assert plain("\x1b]0;PWNED\x07\x1b[2J\x1b[31mred\r\n\tnext \u202eback\ud800") == "]0;PWNED [2J [31mred next back"
    assert len(plain(10**6 * "x")) == 500
    assert Fields({"why": 10**6 * "\x1b"}, "").words("why") == ""
    assert Fields({"why": ["x"]}, "").words("why") == ""


def test_what_cannot_be_shown_is_said_so() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "a list that cannot be shown"
    while deep:  # else freeing it recurses
        deep = deep[0]
    assert shown(1 << 20_000) == "a int that cannot be shown"

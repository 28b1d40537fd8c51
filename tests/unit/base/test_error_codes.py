"""Errors that cross a network or a pipe: code, words and figures arrive, and what cannot be is refused."""

import dataclasses
import inspect
import json
import os
from pathlib import Path
from typing import Any

import pytest

from edge_run.base import errors
from edge_run.base.error_codes import KINDS, error_document, error_of, read_error
from edge_run.base.errors import (
    BudgetError,
    DeviceLost,
    EdgeRunError,
    MeshError,
    ModelFileError,
    ModelFileMissing,
    ProtocolError,
)
from edge_run.base.fields import Fields
from edge_run.devices.members.member_list import canonical
from edge_run.devices.mesh.orders import InboundOrder, OrderExecutor, OutboundOrders
from edge_run.runtime.decoding.driver import GraphChanged
from edge_run.runtime.mesh.transport import GRAPH_CHANGED, PassFailed, code_of

OURS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, EdgeRunError)]


def read(document: Any) -> EdgeRunError:
    return read_error(Fields(json.loads(json.dumps(document)), "an answer", "b"))


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_code_words_and_figures_arrive_and_no_name_of_a_class(kind: type[EdgeRunError]) -> None:
    names = [field.name for field in dataclasses.fields(kind) if field.name != "message"]
    error = kind("what was tried", **{name: "b" if name == "node" else 3 for name in names})
    document = error_document(error)
    for found in (read(document), error_of(json.loads(json.dumps(document)))):
        assert type(found) is kind
        assert (str(found), dataclasses.asdict(found)) == (str(error), dataclasses.asdict(error))
    assert kind.__name__ not in json.dumps(document)


def test_kinds_of_our_own_are_told_as_what_they_are_kinds_of() -> None:
    error = PassFailed("NaN", node="b", code=6, number=3)
    assert error_document(error) == {"code": 6, "error": "NaN", "figures": {"node": "b", "code": 6, "number": 3}}
    assert read(error_document(error)).exit_code == 6
    assert (code_of(GraphChanged("another")), code_of(error)) == (GRAPH_CHANGED, 6)
    assert GRAPH_CHANGED not in KINDS


def test_what_another_version_says_is_understood_as_far_as_it_can_be() -> None:
    later = read({"code": 77, "error": "of a later version", "figures": {"node": "b", "heat_k": 300}})
    assert (type(later), str(later)) == (EdgeRunError, "of a later version")
    assert str(read({"error": "words only"})) == "words only"
    assert type(read({"code": 3, "error": "x", "special": "of a later version"})) is ModelFileError
    assert type(read({"code": 4, "error": "x", "special": "missing"})) is BudgetError, "which has another code"
    assert str(read({"code": 10, "error": "x", "figures": {"message": 1}})) == "x", "its words are no figure"
    assert read({"code": 4, "error": "x", "figures": {"minimum_bytes": 5, "heat_k": 300}}).minimum_bytes == 5  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "document",
    [
        {"code": -1, "error": "x"},
        {"code": "BudgetError", "error": "x"},
        {"code": 4, "error": "x", "figures": {"minimum_bytes": "5"}},
        {"code": 4, "error": "x", "figures": {"minimum_bytes": 10**4000}},
        {"code": 9, "error": "x", "figures": {"node": "\x1b[2J"}},
        {"code": 9, "error": "x", "figures": [1]},
        {"code": 3, "error": "x", "special": ["missing"]},
    ],
)
def test_what_cannot_be_is_refused_and_ends_the_order(document: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        read_error(Fields(document, "an answer", "b"))
    outbound = OutboundOrders()
    number, pending = outbound.add("b", "incarnation", 1, {})
    outbound.take_answer("b", {"number": number, **document})
    assert isinstance(pending.error, ProtocolError)
    assert pending.error.node == "b"


def refused(raised: Exception) -> Exception:
    """Return what giving an order raises where carrying it out raised `raised`."""
    answers: list[Any] = []

    def fail(node: str, epoch: int, order: Any) -> Any:
        raise raised

    executor = OrderExecutor(fail, lambda node, epoch: True, lambda inbound, answer: answers.append(answer))
    outbound = OutboundOrders()
    number, pending = outbound.add("b", "incarnation", 1, {})
    executor.give(InboundOrder("a", "incarnation", 1, number, {}))
    executor.close(timeout_s=10)
    outbound.take_answer("b", {"number": number, **json.loads(json.dumps(answers[0]))})
    assert pending.error is not None
    return pending.error


def test_a_refused_order_keeps_what_it_was_refused_for() -> None:
    error = refused(BudgetError("too small", minimum_bytes=7, found_bytes=5))
    assert isinstance(error, MeshError)
    assert (str(error), error.node) == ("node b: too small", "b")
    assert isinstance(error.__cause__, BudgetError)
    assert (error.__cause__.minimum_bytes, error.__cause__.found_bytes) == (7, 5)
    assert isinstance(refused(ModelFileMissing("m.gguf: is not there")).__cause__, FileNotFoundError)
    why = refused(DeviceLost("node c at 10.0.0.1:22: nothing listens there", node="c"))
    assert "10.0.0.1" not in str(why), "which ports are open elsewhere is told to nobody"
    assert "KeyError" not in str(refused(KeyError("x"))), "our mistakes are for our own log"


def test_an_answer_that_cannot_be_sent_is_said_and_the_next_order_is_carried_out() -> None:
    answers: list[Any] = []

    def send(inbound: InboundOrder, answer: Any) -> None:
        if "answer" in answer and answer["answer"].get("size") == "too large":
            raise ProtocolError("an answer that is too large")
        answers.append((inbound.number, canonical(answer)))

    def carry_out(node: str, epoch: int, order: Any) -> Any:
        if order.get("fail"):
            raise EdgeRunError(f"{Path(os.fsdecode(bytes([99, 233])))}: a file whose name is no text")
        return order

    executor = OrderExecutor(carry_out, lambda node, epoch: True, send)
    for number, order in enumerate([{"size": "too large"}, {"fail": True}, {"size": "small"}]):
        executor.give(InboundOrder("a", "incarnation", 1, number, order))
    executor.close(timeout_s=10)
    assert [number for number, _ in answers] == [0, 1, 2]
    assert b"too large" in answers[0][1]
    assert b"no text" in answers[1][1]

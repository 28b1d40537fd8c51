"""Members that say what cannot be: they are left out, nobody else is, and the text goes on, token for token."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader

from edge_run.base.errors import KernelError, ProtocolError
from edge_run.base.fields import Document
from edge_run.base.sampling_config import SamplingConfig
from edge_run.partition.activation_codec import encode_activations
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.generation.sampling import Sampler
from edge_run.runtime.mesh.transport import GRAPH_CHANGED
from in_child import in_child
from mesh_runs import Run, alone, greedy, running
from tiny_models import make_model

Alter = Callable[[dict[str, Any], list[bytes]], tuple[dict[str, Any], list[bytes]]]
HUGE = 10**4000
N_UNITS = 6  # of the model


def says(**fields: Any) -> Alter:
    """A liar whose headers have `fields`."""
    return lambda header, parts: ({**header, **fields}, parts)


def with_numbers(value: float, every: int = 1) -> Alter:
    """A liar whose activations are `value`, or some of them."""

    def alter(header: dict[str, Any], parts: list[bytes]) -> tuple[dict[str, Any], list[bytes]]:
        numbers = np.frombuffer(parts[0], np.float32).copy()
        numbers[::every] = value
        return header, [numbers.tobytes(), *parts[1:]]

    return alter


@functools.cache
def bomb() -> bytes:
    """Return 64 MiB in a few kilobytes."""
    return encode_activations(np.zeros((4096, 4096), np.float32))


LIES: dict[str, Alter] = {
    "a huge number": says(spent={"b": HUGE, "c": HUGE, "a": HUGE}),
    "no number": says(spent={"b": float("nan"), "c": float("nan")}),
    "an infinity": says(spent={"b": float("inf")}),
    "less than nothing": says(spent={"b": -1e300, "c": -1.0}),
    "a truth": says(spent={"b": True}),
    "a list": says(spent=[1, 2]),
    "many": says(spent={f"n{i}": 1.0 for i in range(5000)}),
    "unknown codes": says(codes=["rot13"]),
    "codes without end": says(codes=[["packed"] * 1000] * 50),
    "a part too many": lambda header, parts: ({**header, "codes": None}, [*parts, b"1234"]),
    "no part": lambda header, parts: ({**header, "codes": []}, []),
    "half a part": lambda header, parts: ({**header, "codes": None}, [parts[0][:-4], *parts[1:]]),
    "a bomb": lambda header, parts: ({**header, "codes": ["compact"]}, [bomb()]),
    "a packed bomb": lambda header, parts: ({**header, "codes": ["packed"]}, [struct.pack("<II", 1 << 24, 8)]),
    "NaN": with_numbers(float("nan")),
    "one NaN": with_numbers(float("nan"), every=10**6),
    "infinities": with_numbers(float("inf")),
    "a failure with a huge number": says(kind="failed", number=HUGE),
    "a failure without a number": says(kind="failed", number=None),
    "a failure that fills a screen": says(kind="failed", error="\x1b]0;X\x07\r" + 60_000 * "w", code=10**300, lost=[1]),
}


@pytest.mark.parametrize("liar", ["b", "c"])
@pytest.mark.parametrize("part", [0, 1])
@in_child
def test_who_lies_in_a_header_or_a_state_is_left_out_and_the_text_goes_on(liar: str, part: int, folder: Path) -> None:
    """Whether it lies to the coordinator, or to another worker, which says so: `c` is the last, `b` in between."""
    path = make_model("llama", folder)
    wanted = alone(path, 8)
    with running(path) as run:
        for name in list(LIES)[part::2]:
            assert _nodes(run) == {"a", "b", "c"}, (name, "a run begins with all, whoever lied in the one before")
            assert greedy(run.engine, 8, at=_lie(run, liar, LIES[name], at_token=4)) == wanted, name
            use = run.engine.mesh_use
            assert use is not None
            assert list(use.left_out) == [liar], (name, use.left_out)
            assert liar not in _nodes(run)
            assert len(use.nodes) == 2, (name, "the honest ones go on")
            assert all(len(line) < 1000 and line.isprintable() for line in (*run.said, *use.left_out.values())), name
            run.open_anew()


def _nodes(run: Run) -> set[str]:
    """Return who computes."""
    assert run.engine.mesh_use is not None
    return {node.node for node in run.engine.mesh_use.nodes}


def _lie(run: Run, liar: str, lie: Alter, at_token: int) -> Callable[[int], None]:
    """Have `liar` tell a lie with each activation, from a token on; the function that is returned is told of each."""
    reached: list[int] = []

    def alter(source: str, target: str, header: Document, parts: list[bytes]) -> tuple[Document, list[bytes]]:
        is_lying = source == liar and header["kind"] == "activation" and at_token in reached
        return lie(dict(header), parts) if is_lying else (header, parts)

    run.hub.alter = alter
    return reached.append


@in_child
def test_who_blames_one_after_another_is_left_out_itself(folder: Path) -> None:
    """The first is believed; the others stay."""
    path = make_model("llama", folder)
    wanted = alone(path, 8)
    with running(path, "bcde") as run:

        def blame(source: str, target: str, header: Document, parts: list[bytes]) -> tuple[Document, list[bytes]]:
            if source != "e" or header["kind"] != "activation" or len(parts) == 0:
                return header, parts
            owners = run.workers["e"]._runs.run.transport._owners  # type: ignore[union-attr]
            other = next(node for node in reversed(owners) if node not in ("a", "e"))
            return {**header, "kind": "failed", "error": "NaN", "code": ProtocolError.exit_code, "blames": other}, []

        run.hub.alter = blame
        assert greedy(run.engine, 8) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert len(use.left_out) == 2
        assert "blames one device after another" in use.left_out["e"]


@in_child
def test_who_says_again_and_again_that_a_graph_is_new_is_left_out(folder: Path) -> None:
    """It ended the run, as a model that cannot be spread over devices does."""
    path = make_model("llama", folder)
    wanted = alone(path, 8)
    with running(path) as run:
        lie = says(kind="failed", code=GRAPH_CHANGED, error="another graph")
        assert greedy(run.engine, 8, at=_lie(run, "b", lie, at_token=4)) == wanted
        use = run.engine.mesh_use
        assert use is not None
        assert list(use.left_out) == ["b"], use.left_out


@in_child
def test_weights_that_give_no_numbers_are_said_to_be_damaged_when_this_device_has_seen_them_alone(
    folder: Path, tmp_path: Path
) -> None:
    """Whoever computes them gives NaN, and is left out; it is the model's fault only where it happens here too."""
    path = _damaged(make_model("llama", folder), tmp_path, "blk.1.ffn_norm.weight")
    with running(path) as run:
        logits, _ = Session(run.engine.front).feed([1, 2, 3])
        use = run.engine.mesh_use
        assert use is not None
        assert [node.node for node in use.nodes] == ["a"]
        assert set(use.left_out) == {"b", "c"}
        assert all("no number" in why for why in use.left_out.values())
        model = run.engine.model
        with (
            pytest.raises(KernelError, match="copy or download"),
            Sampler(model.vocab, SamplingConfig(), model.vocabulary) as sampler,
        ):
            sampler.choose(logits)


@in_child
def test_where_nobody_else_can_be_to_blame_the_model_is_said_to_be_damaged_at_once(
    folder: Path, tmp_path: Path
) -> None:
    path = _damaged(make_model("llama", folder), tmp_path, "token_embd.weight")
    with running(path) as run:
        with pytest.raises(KernelError, match="copy or download"):
            Session(run.engine.front).feed([0, 0, 0])
        use = run.engine.mesh_use
        assert use is not None
        assert not use.left_out


def _damaged(path: Path, folder: Path, name: str) -> Path:
    """Return a copy of a model whose tensor `name` begins with NaN."""
    damaged, content = folder / "damaged.gguf", bytearray(path.read_bytes())
    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    content[tensor.data_offset : tensor.data_offset + 4] = b"\xff" * 4  # in all floating types
    damaged.write_bytes(content)
    return damaged


WILD: list[Any] = [HUGE, -1, float("nan"), float("inf"), True, "1", None, [1], {"x": 1}, 2**63]
ANSWERS: list[dict[str, Any]] = [
    {"room_bytes": HUGE},
    {"compute_bytes_per_s": float("nan")},
    {"missing_bytes": [HUGE] * N_UNITS, "most_weight_bytes": HUGE},
    {"missing_bytes": [0] * N_UNITS, "most_weight_bytes": 10**300},
    {"missing_bytes": [1] * 100_000, "most_weight_bytes": 1},
    {"layout": [HUGE]},
]


@in_child
def test_who_answers_an_order_with_what_cannot_be_is_left_out_and_the_run_begins(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path, 3)
    for fields in ANSWERS:
        left_out = _answering(path, wanted, "prepare", fields)
        assert list(left_out) == ["b"], (str(fields)[:80], left_out)


@in_child
def test_links_that_were_measured_to_be_what_cannot_be_count_for_nothing(folder: Path) -> None:
    path = make_model("llama", folder)
    wanted = alone(path, 3)
    links = {node: [value, value] for node, value in zip("acdefghijk", WILD, strict=True)}
    wild: list[dict[str, Any]] = [
        {"links": links, "unreached": {}},
        {"links": {"a": [HUGE, 1e6], "c": [0.1, HUGE]}, "unreached": {"x": "\x1b[2J"}},
        {"links": {f"n{i}": [0.1, 1e6] for i in range(5000)}},
        {"links": HUGE, "unreached": [HUGE]},
    ]
    for fields in wild:
        assert not _answering(path, wanted, "measure", fields)


def _answering(path: Path, wanted: list[int], what: str, fields: dict[str, Any]) -> Document:
    """Run with `b` answering orders with `fields`; return who was left out."""

    def alter(node: str, order: Document, answer: Document) -> Document:
        return {**answer, **fields} if node == "b" and order["order"] == what else answer

    with running(path, before=lambda hub: setattr(hub, "alter_answer", alter)) as run:
        assert greedy(run.engine, 3) == wanted
        use = run.engine.mesh_use
        assert use is not None
        return use.left_out


COMMANDS: dict[str, tuple[str, list[int]]] = {
    "4,000 branches": ("decode", [1, 0, 0, 1, 4000, *[0x41414141] * 4000]),
    "a sequence that is not there": ("decode", [1, 0, 77, 1, 0]),
    "a token that is not there": ("decode", [2**31 - 1, 0, 0, 1, 0]),
    "a position at the end of all": ("decode", [1, 2**31 - 1, 0, 1, 0]),
    "more logits than there is room for": ("decode", [1, 0, 0, 1, 0, 1, 1, 0, 1, 0]),
    "a graph of 4,000 tokens": ("learn", [4000, 1]),
    "a graph of fewer than no tokens": ("learn", [-1, -1]),
    "to rewind what is not there": ("rewind", [4000, 0]),
    "to branch into what is not there": ("branch", [0, 4000]),
    "to keep what is not there": ("keep", [-5, 0, 4000, 4000]),
    "16 MiB of zeros": ("decode", [0] * (1 << 22)),
    "nothing": ("decode", []),
}


@in_child
def test_whatever_a_coordinator_commands_its_workers_live(folder: Path) -> None:
    """They refuse it, the run goes on without them; and the next run has them all."""
    path = make_model("llama", folder)
    wanted = alone(path, 6)
    with running(path) as run:
        for name, (what, numbers) in COMMANDS.items():
            commanded = False

            def command(
                source: str, target: str, header: Document, parts: list[bytes], what: str = what, wild: bytes = b""
            ) -> tuple[Document, list[bytes]]:
                nonlocal commanded
                if header["kind"] != "command" or header["what"] != "decode" or commanded:
                    return header, parts
                commanded = target == "c"
                return {**header, "what": what}, [wild]

            wild = np.array(numbers, "<i8").astype("<i4").tobytes()
            run.hub.alter = functools.partial(command, wild=wild)
            assert greedy(run.engine, 6) == wanted, name
            assert commanded, name
            run.open_anew()
            assert all(worker._runs._thread.is_alive() for worker in run.workers.values()), name
            assert _nodes(run) == {"a", "b", "c"}, name

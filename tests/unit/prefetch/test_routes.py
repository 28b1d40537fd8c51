"""Route traces: what is written is read again, and what is no trace is refused in one line."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from edge_run.base.errors import ModelFileError
from edge_run.prefetch.routes import DECODE, PREFILL, LookUp, Route, RouteHeader, RouteReader, RouteWriter

HEADER = RouteHeader({0: 100, 2: 200}, {0: 5, 2: 6}, "tiny.gguf", "tiny", 8, 2)
PREAMBLE = "# route_trace v1\n# n_expert=8\n# layer=0 expert_bytes=100 dense_bytes=5\n"
COLUMNS = "turn,phase,step,layer,slot,expert\n"


def trace(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    routes = [
        Route(0, PREFILL, step, layer, slot, (step + slot) % 8)
        for layer in (0, 2)
        for step in (0, 1)
        for slot in (0, 1)
    ]
    routes += [Route(0, DECODE, 2, layer, slot, 3 + slot, 0.25, 1) for layer in (0, 2) for slot in (0, 1)]
    text = io.StringIO()
    writer = RouteWriter(text, HEADER)
    writer.write(routes[:3])
    writer.write(routes[3:])
    with RouteReader(trace(tmp_path, text.getvalue())) as reader:
        assert reader.header == HEADER
        assert [tuple(route)[:6] for route in reader] == [tuple(route)[:6] for route in routes]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Two  Words", "Two_Words"),
        ("a\nb\r\tc\u2028d ", "a_b_c_d"),
        ("x" * 5000, "x" * 200),
        ("# layer=7\n", "#_layer=7"),
        ("caf\udce9", "caf\ufffd"),
    ],
)
def test_a_model_may_have_any_name(name: str, found: str, tmp_path: Path) -> None:
    """As of what a file says of itself; it stays one word of one line."""
    text = io.TextIOWrapper(io.BytesIO(), "utf-8", newline="\n")
    RouteWriter(text, replace(HEADER, model=name, architecture=name)).write([Route(0, DECODE, 1, 2, 0, 3)])
    text.seek(0)
    with RouteReader(trace(tmp_path, text.read())) as reader:
        assert reader.header == replace(HEADER, model=found, architecture=found)
        assert len(list(reader)) == 1


def test_a_prompt_is_a_batch_for_each_layer_and_a_token_looks_up_each_expert_once(tmp_path: Path) -> None:
    rows = ["0,0,0,0,0,1", "0,0,0,0,1,2", "0,0,1,0,0,2", "0,0,1,0,1,1", "0,1,2,0,0,5", "0,1,2,0,1,5", "0,1,3,0,0,5"]
    rows += ["1,0,4,0,0,6", "1,1,5,0,0,7"]
    with RouteReader(trace(tmp_path, PREAMBLE + COLUMNS + "\n".join(rows))) as reader:
        assert list(reader.look_ups()) == [
            LookUp(0, (1, 2, 2, 1), True),
            LookUp(0, (5,), False),
            LookUp(0, (5,), False),
            LookUp(0, (6,), True),
            LookUp(0, (7,), False),
        ]


def test_columns_are_found_by_name_and_others_passed_over(tmp_path: Path) -> None:
    text = PREAMBLE + "dropped,expert,slot,layer,step,phase,turn,weight\n-,4,1,0,9,1,0,0.5\n\n"
    with RouteReader(trace(tmp_path, text)) as reader:
        assert list(reader) == [Route(0, 1, 9, 0, 1, 4)]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "its first line is not '# route_trace v1'"),
        ("GGUF\x00\x01", "not a route trace"),
        ("# route_trace v2\n", "not a route trace"),
        ("# route_trace v1\n" + COLUMNS, "line 2: the preamble names no layer with experts"),
        ("# route_trace v1\n# layer=0 dense_bytes=4\n", "line 2: expert_bytes is '', a whole number from 0 needed"),
        (PREAMBLE + "# layer=0 expert_bytes=1\n", "line 4: layer 0 is there twice"),
        (PREAMBLE + "# layer=-1 expert_bytes=1\n", "line 4: layer is '-1', a whole number"),
        (PREAMBLE + "# n_expert=99999999\n" + COLUMNS, "n_expert is 99999999, at most 65536 can be"),
        (PREAMBLE, "line 4: no column turn, phase, step, layer, slot, expert; needed are"),
        (PREAMBLE + "turn,phase,layer,slot,expert\n", "no column step; needed are"),
        (PREAMBLE + COLUMNS + "0,1,0,0,0\n", "line 5: 5 fields, 6 needed"),
        (PREAMBLE + COLUMNS + "0,1,0,0,0,x\n", "line 5: expert is 'x', a whole number from 0 needed"),
        (PREAMBLE + COLUMNS + "0,1,0,0,0,-1\n", "expert is '-1'"),
        (PREAMBLE + COLUMNS + "0,1,0,0,0,1.5\n", "expert is '1.5'"),
        (PREAMBLE + COLUMNS + f"0,1,{'9' * 50},0,0,1\n", "step is '999999999999999999999999999999...'"),
        (PREAMBLE + COLUMNS + "0,1,0,0,0,8\n", "line 5: expert 8 is out of range, 0 to 7 needed"),
        (PREAMBLE + COLUMNS + "0,1,0,3,0,1\n", "line 5: layer 3 is out of range: the preamble has no experts for it"),
        (PREAMBLE + COLUMNS + "0,2,0,0,0,1\n", "phase 2, 0 (prefill) or 1 (decode) needed"),
        (PREAMBLE + COLUMNS.strip() + ",x" * 1000 + "\n1\n", "line 5: 1 fields, 1006 needed (turn,phase,"),
        (PREAMBLE.replace("# n_expert=8\n", "") + COLUMNS + "0,1,0,0,0,65536\n", "0 to 65535 needed"),
    ],
)
def test_what_is_no_trace_is_refused_in_a_line(tmp_path: Path, text: str, told: str) -> None:
    path = trace(tmp_path, text)
    with pytest.raises(ModelFileError) as caught, RouteReader(path) as reader:
        list(reader.look_ups())
    message = str(caught.value)
    assert message.startswith(str(path))
    assert told in message
    assert "\n" not in message
    assert len(message) < 1000


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="there is no such trace"):
        RouteReader(tmp_path / "none.csv")


def test_a_folder_and_bytes_that_are_no_text(tmp_path: Path) -> None:
    from edge_run.base.errors import TierReadError

    with pytest.raises(TierReadError, match="cannot be read"):
        RouteReader(tmp_path)
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(range(256)) * 100)
    with pytest.raises(ModelFileError, match="not a route trace"):
        RouteReader(path)

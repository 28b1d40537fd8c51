"""`edge-run replay`: tables, JSON, pictures, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import edge_run
from edge_run.base.errors import BudgetError, ConfigError, ModelFileError
from edge_run.cli.app import _run
from edge_run.cli.reports import replay_plot
from edge_run.cli.shared.terminal import Terminal
from edge_run.prefetch.replay import BUDGET_SHARES, NAMES
from routes import EXPERT_BYTES, SMALL, write_trace


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "t.csv")


def run(*words: object) -> int:
    return _run(["replay", *map(str, words)], Terminal())


def test_all_policies_under_all_budgets(trace: Path) -> None:
    found = edge_run.replay(trace)
    assert found.policies == NAMES
    assert len(found.budgets_bytes) == len(BUDGET_SHARES)
    assert (found.layers, found.experts, found.experts_per_token) == (4, 16, 3)
    assert (found.prompts, found.decoded_tokens) == (1, 20)
    assert found.expert_bytes == found.budgets_bytes[-1] == 4 * 16 * EXPERT_BYTES
    for one in found.replays:
        assert one.look_ups == 20 * 4 * 3
        assert one.hit_rate == one.hits / one.look_ups
        assert one.bytes_read == (one.look_ups - one.hits) * EXPERT_BYTES
        assert one.bytes_per_token == one.bytes_read / 20
    everything = {found.of(name, found.expert_bytes).hits for name in NAMES if not name.startswith("layer-")}
    assert len(everything) == 1, "where all fits, only first uses are missed"


def test_json_has_the_same_figures(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--budget", "20kB", "--budget", 10_000, "--policy", "default", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["policy"], one["budget_bytes"]) for one in found["replays"]] == [
        ("default", 20_000),
        ("default", 10_000),
    ]
    assert found == json.loads(edge_run.to_json(edge_run.replay(trace, ["20kB", 10_000], ["default"])))


def test_table(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--budget", "20KiB") == 0
    lines = capsys.readouterr().out.splitlines()
    assert "20 tokens decoded, with 3 of 16 experts in each of 4 layers" in lines[0]
    assert lines[3].split() == ["budget", *NAMES]
    assert lines[4].split()[:2] == ["20", "KiB"]
    assert len({len(line) for line in lines[3:5]}) == 1


def test_picture(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert run(trace, "--plot", tmp_path / "hits.png") == 0
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")
    assert f"Drawn: {tmp_path / 'hits.png'}" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*.part"))
    assert run(trace, "--plot", tmp_path / "hits.png") == 2
    refused = capsys.readouterr()
    assert "hits.png: exists; choose another name, or replace it with --force" in refused.err
    assert not refused.out
    assert run(trace, "--plot", tmp_path / "hits.png", "--force") == 0


def test_a_picture_of_a_trace_whose_name_is_no_text(trace: Path) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    replay_plot.draw(replace(edge_run.replay(trace), trace="caf\udce9.csv"), figure)
    assert figure.get_suptitle().startswith("caf\ufffd.csv: ")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["--budget", "999"], 4, "less than one expert, which takes 1000 B; give --budget 1MiB or more"),
        (["--budget", "much"], 2, "not a size"),
        (["--policy", "arc"], 2, "policy 'arc': not known; choose one of optimum, lru"),
        (["--plot", "hits.svg"], 2, "must be a PNG file"),
        (["--force"], 2, "--force: replaces a picture; name it with --plot"),
        (["--what"], 2, "No such option"),
    ],
)
def test_refusals(trace: Path, words: list[str], code: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, *words) == code
    output = capsys.readouterr()
    assert told in output.err
    assert output.err.count("\n") == 1
    assert not output.out


def test_what_is_no_trace_or_decodes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none.csv") == 3
    assert run(write_trace(tmp_path / "prompt.csv", SMALL, tokens=0)) == 3
    assert "no decoded token" in capsys.readouterr().err


def test_more_experts_than_any_model_has_are_refused_before_they_take_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["# route_trace v1", "# n_expert=65536", *(f"# layer={layer} expert_bytes=1" for layer in range(17))]
    path = tmp_path / "large.csv"
    path.write_text("\n".join([*lines, "turn,phase,step,layer,slot,expert", "0,1,0,0,0,1", ""]))
    assert run(path) == 3
    assert "17 layers of 65536 experts, 1048576 experts in all can be" in capsys.readouterr().err


def test_errors_carry_their_figures(trace: Path) -> None:
    with pytest.raises(BudgetError) as caught:
        edge_run.replay(trace, [10])
    assert (caught.value.found_bytes, caught.value.minimum_bytes) == (10, EXPERT_BYTES)
    with pytest.raises(ConfigError):
        edge_run.replay(trace, policies=["arc"])
    with pytest.raises(ModelFileError) as refused:
        edge_run.replay(Path(__file__))
    assert "not a route trace" in str(refused.value)

"""What `mesh init` and `mesh invite` say to whoever makes a cluster, before any device is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.files.folders import mesh_folder
from edge_run.cli.app import _run
from edge_run.cli.shared.setting import BROKER_VARIABLE
from edge_run.cli.shared.terminal import Terminal
from edge_run.devices.members.cluster import read_cluster


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv(BROKER_VARIABLE, raising=False)


@pytest.mark.parametrize(
    ("place", "until"),
    [
        (("--serve", "0.0.0.0"), "the mesh is used, as the broker runs in it"),
        (("--broker", "mqtt://192.0.2.1"), "others come in"),
    ],
)
def test_whoever_makes_a_cluster_is_told_how_long_the_first_device_is_needed(
    place: tuple[str, str], until: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["mesh", "init", *place], Terminal()) == 0
    assert f"On this device, first, and as long as {until}:  edge-run mesh join" in capsys.readouterr().err


@pytest.mark.parametrize("serve", [(), ("--serve", "localhost"), ("--serve", "[::1]:1999")])
def test_a_broker_that_nobody_could_find_is_not_looked_for(
    serve: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["mesh", "init", "--find", *serve], Terminal()) == 2
    assert "--serve 0.0.0.0" in capsys.readouterr().err
    assert read_cluster(mesh_folder()) is None, "no cluster is made"
    assert _run(["mesh", "init", *serve], Terminal()) == 0
    assert _run(["mesh", "invite", "--find"], Terminal()) == 2
    assert _run(["mesh", "init", "--find", "--serve", "0.0.0.0", "--replace"], Terminal()) == 0

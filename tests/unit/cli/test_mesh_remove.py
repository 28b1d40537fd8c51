"""`mesh remove` where it could not be undone: of the device whose broker all devices use."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_run.base.files.folders import mesh_folder
from edge_run.cli.app import _run
from edge_run.cli.shared.terminal import Terminal
from edge_run.devices.members.cluster import found_cluster, read_cluster, write_cluster
from edge_run.devices.members.identity import device_key
from edge_run.devices.members.list_changes import ListEditor, take_over
from edge_run.devices.mesh import changes
from mesh_lists import let_in


@pytest.mark.parametrize("serves", ["127.0.0.1:1883", None])
def test_who_removes_the_device_of_the_broker_is_told_before(
    serves: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(changes, "spread", lambda folder: (None, "nobody is there"))
    founder, heir = device_key(tmp_path / "first"), device_key(mesh_folder())
    cluster = found_cluster(founder, "first", "mqtt://host", serves)
    listed = let_in(ListEditor(founder, cluster.listed, cluster.secret), heir, "heir")
    taken = take_over(ListEditor(founder, listed, cluster.secret).hand_on("heir"), heir)
    assert taken is not None
    write_cluster(mesh_folder(), cluster.adopt(taken, heir))

    def members() -> set[str]:
        known = read_cluster(mesh_folder())
        assert known is not None
        return {one.name for one in known.listed.roll.members}

    if serves:
        assert _run(["mesh", "remove", "first"], Terminal()) == 2
        assert "first: runs the broker of this cluster, which ends with it" in capsys.readouterr().err
        assert members() == {"first", "heir"}
    assert _run(["mesh", "remove", "first", *(["--with-broker"] if serves else [])], Terminal()) == 0
    assert members() == {"heir"}

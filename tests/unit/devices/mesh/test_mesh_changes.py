"""A change of the list of members for a command, where other programs of the device change it meanwhile."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edge_run.devices.members.cluster import read_cluster, write_cluster
from edge_run.devices.members.list_changes import ListEditor
from edge_run.devices.members.member_list import MemberList
from edge_run.devices.mesh import changes
from mesh_lists import make_cluster


def test_a_change_that_another_program_wrote_over_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `mesh join`, which had heard of another device's change, and writes it when nobody can be told of this one."""
    cluster = make_cluster(tmp_path, "mqtt://host", ["one", "two"])
    folder, told = tmp_path / "one", list[MemberList]()

    def spread(folder: Path) -> tuple[None, str]:
        known = read_cluster(folder)
        assert known is not None
        told.append(known.listed)
        if len(told) == 1:
            device = changes.DeviceKey((folder / "node.key").read_bytes())
            theirs = ListEditor(device, cluster.listed, cluster.secret).rotate(cluster.secret)
            write_cluster(folder, dataclasses.replace(known, listed=theirs))
        return None, "nobody is there"

    monkeypatch.setattr(changes, "spread", spread)
    changed, why = changes.make_change(
        folder, lambda editor: editor.remove("two"), lambda listed: len(listed.members) == 1
    )
    assert why == "nobody is there"
    assert len(told) == 2
    assert read_cluster(folder) == changed
    assert len(changed.listed.members) == 1

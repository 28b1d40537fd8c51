"""Changes of the list of members for a command: beside those of other programs, and of the heir of a cluster."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from edge_run.devices.members.cluster import (
    FIND_BROKER,
    invitation_line,
    parse_join_line,
    read_cluster,
    write_cluster,
)
from edge_run.devices.members.identity import device_key
from edge_run.devices.members.list_changes import ListEditor, take_over
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
            theirs = ListEditor(device_key(folder), cluster.listed, cluster.secret).rotate(cluster.secret)
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


def test_a_broker_is_found_by_the_lines_of_whoever_is_the_founder(tmp_path: Path) -> None:
    """It is announced by the first founder's key, which all devices keep, and which is in the heir's lines too."""
    cluster = make_cluster(tmp_path, "mqtt:", ["one", "heir"], serves="0.0.0.0:1883")
    heir = device_key(tmp_path / "heir")
    taken = take_over(ListEditor(device_key(tmp_path / "one"), cluster.listed, cluster.secret).hand_on("heir"), heir)
    assert taken is not None
    of_heir = cluster.adopt(taken, heir)
    assert of_heir.listed.charter.founder == heir.public_key
    assert of_heir.listed.charter.broker_key == cluster.listed.charter.broker_key
    line = invitation_line(changes.invited_to(of_heir, FIND_BROKER, bytes(32)))
    assert parse_join_line(line).founder == cluster.founder

"""What people see of a mesh: names that tell devices apart, and links to those that are there."""

from __future__ import annotations

from edge_run.base.fields import Document
from edge_run.base.mesh import Member, names_apart
from edge_run.base.mesh_status import MeshLink, MeshMember, MeshStatus
from edge_run.cli.mesh.status import describe
from edge_run.devices.mesh.watch import present


def member(node: str, name: str, links: tuple[MeshLink, ...] = ()) -> MeshMember:
    return MeshMember(node, name, False, {}, (), {}, links)


def test_devices_of_one_name_are_told_apart_by_their_ids() -> None:
    members = [Member("aa", "box", "1", {}), Member("bb", "box", "1", {}), Member("cc", "other", "1", {})]
    assert names_apart(members) == {"aa": "box (aa)", "bb": "box (bb)", "cc": "other"}


def test_status_tells_them_apart_where_it_shows_links() -> None:
    members = (member("aa", "box", (MeshLink("tcp://127.0.0.1:1", 0.001, 1e8, "bb"),)), member("bb", "box"))
    text = describe(MeshStatus("c", "mqtt://h:1", "aa", 1, {"model": "m.gguf"}, members))
    assert "box (aa) to box (bb)" in text
    assert "box (aa) runs m.gguf" in text


def test_links_to_devices_that_are_gone_are_not_shown() -> None:
    load: Document = {"tokens_per_s": 2.0, "links": {"bb": {"place": "tcp://h:1"}, "gone": {"place": "tcp://h:2"}}}
    members = [Member("aa", "one", "1", {}), Member("bb", "two", "1", {})]
    assert present(load, members) == {"tokens_per_s": 2.0, "links": {"bb": {"place": "tcp://h:1"}}}
    assert present({}, members) == {}

"""What `edge-run mesh status` says: frozen dataclasses, whose field names are the keys of its `--json`."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.base.mesh import Document, LinkRate, Named


@dataclass(frozen=True, slots=True)
class MeshLink(LinkRate):
    """The link from a member to `node`, as the member measured it last."""

    node: str


@dataclass(frozen=True, slots=True)
class MeshMember(Named):
    """A device that is present: what it announced, the layers that it holds by the latest plan, what it measured.

    layers: first and last of each range, both included.
    load: how busy it said last that it is.
    """

    is_coordinator: bool
    capabilities: Document
    layers: tuple[tuple[int, int], ...]
    load: Document
    links: tuple[MeshLink, ...]


@dataclass(frozen=True, slots=True)
class MeshStatus:
    """A mesh, as somebody sees it who looked on for a moment.

    coordinator: whose model runs now, empty for nobody's.
    """

    cluster: str
    broker: str
    coordinator: str
    epoch: int
    plan: Document
    members: tuple[MeshMember, ...]


@dataclass(frozen=True, slots=True)
class MeshJoin:
    """What `mesh init` and `mesh invite` made: an invitation to a cluster.

    join_line: a secret, empty unless it was asked for.
    role: what whoever comes in with it may do.
    uses: how many may.
    expires_s: when it ends, in seconds since 1970.
    """

    cluster: str
    broker: str
    folder: str
    join_line: str
    role: str
    uses: int
    expires_s: int


@dataclass(frozen=True, slots=True)
class ClusterMember(Named):
    """A member by the list.

    role: founder, lead, use or compute.
    """

    role: str


@dataclass(frozen=True, slots=True)
class OpenInvitation:
    """An invitation that somebody may still come in with.

    expires_s: when it ends, in seconds since 1970.
    """

    role: str
    uses: int
    expires_s: int


@dataclass(frozen=True, slots=True)
class ClusterMembers:
    """Who may take part in a cluster.

    changes: how often the list was changed.
    removed: nodes that were sent away.
    """

    cluster: str
    changes: tuple[int, int, int]
    members: tuple[ClusterMember, ...]
    removed: tuple[str, ...]
    invitations: tuple[OpenInvitation, ...]

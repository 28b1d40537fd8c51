"""What is said of a mesh, by `edge-run mesh status` and in answers: dataclasses whose fields are keys of `--json`."""

from __future__ import annotations

from dataclasses import dataclass

from edge_run.base.fields import Document
from edge_run.base.mesh import LinkRate, Named


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


@dataclass(frozen=True, slots=True)
class MeshNode:
    """A device of a run: its id and name, the blocks of the model that it computes, and what it reads for each token.

    The device that has the tokens also computes what comes before the first block and after the last.
    """

    node: str
    name: str
    blocks: tuple[int, ...]
    streamed_bytes: int


@dataclass(frozen=True, slots=True)
class MeshUse:
    """How a model was spread over devices, at the end of an answer.

    epoch: of the plan in force.
    nodes: in the order of the ring.
    rounds: how often a token goes around the ring.
    groups: how many groups of answers may be computed at the same time; 1: the devices take turns.
    predicted_token_s: what a token was expected to take.
    token_s: what a token took, the median of late.
    hop_s: what a hop from one device to the next took.
    sent_bytes: of the activations that this device handed on.
    plain_bytes: of the same activations before they were coded.
    activations: how many of them went `plain`, `packed` (exact) and `compact` (rounded).
    recoveries: new plans since the model was opened, each with all computed again.
    left_out: devices that do not take part, and why.
    """

    epoch: int
    nodes: tuple[MeshNode, ...]
    rounds: int
    groups: int
    predicted_token_s: float
    token_s: float
    hop_s: float
    sent_bytes: int
    plain_bytes: int
    activations: dict[str, int]
    recoveries: int
    left_out: dict[str, str]

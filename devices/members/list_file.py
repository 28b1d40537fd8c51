"""The file of the list of members, which all processes of a device share."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable
from pathlib import Path

from edge_run.base.errors import MeshError
from edge_run.devices.members.cluster import Cluster, members_path, read_cluster, write_cluster
from edge_run.devices.members.identity import brief_lock, device_key
from edge_run.devices.members.keeping import ListEditor
from edge_run.devices.members.member_list import MOST_BYTES, MemberList

logger = logging.getLogger(__name__)

_LOCK_FILE = "cluster.lock"
UNLISTED = (
    "cluster {}: was made before members could be invited and removed, so whoever has its line is a member for good; "
    "make a new one with `edge-run mesh init --replace`, and join it anew on each device"
)


class ListFile:
    """The file in `folder`, as one process reads and writes it."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder, self._path = folder, members_path(folder, cluster)
        self._seen = self._stamp()
        self._unkept: Cluster | None = None

    def changed(self) -> bytes | None:
        """Return what another process wrote since the last look; None where nothing was. Keeps what is to be kept."""
        self._write()
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        self._seen = stamp
        try:
            with self._path.open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError:
            return None

    def keep(self, cluster: Cluster) -> None:
        """Write the list of `cluster`, and its secret, unless the file has a newer one. Failures are logged.

        Nothing is waited for: while another process changes the list, it is left for the next look at it.
        """
        self._unkept = cluster
        self._write()

    def _write(self) -> None:
        cluster = self._unkept
        if cluster is None:
            return
        try:
            with brief_lock(self._folder / _LOCK_FILE, is_patient=False):
                known = read_cluster(self._folder)
                if known is None or known.id != cluster.id or known.listed is None or cluster.listed is None:
                    pass  # this device left the cluster meanwhile
                elif known.listed.order < cluster.listed.order:
                    changed = dataclasses.replace(known, listed=cluster.listed, secret=cluster.secret)
                    write_cluster(self._folder, changed)
                    self._seen = self._stamp()
        except BlockingIOError:
            return
        except (MeshError, OSError) as error:
            logger.warning("the list of members is not kept: %s", error)
        if self._unkept is cluster:  # else a newer one came meanwhile
            self._unkept = None

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size


def listed_in(cluster: Cluster) -> MemberList:
    """Return the list of `cluster`. Raises MeshError where it has none, and says what to do."""
    if cluster.listed is None:
        raise MeshError(UNLISTED.format(cluster.id))
    return cluster.listed


def change_list(folder: Path, change: Callable[[ListEditor], MemberList]) -> Cluster:
    """Change the list that is kept in `folder`, and return the cluster with it. Raises MeshError, NotTrusted."""
    with brief_lock(folder / _LOCK_FILE):
        cluster = read_cluster(folder)
        if cluster is None:
            raise MeshError("mesh: this device belongs to none; `edge-run mesh init` makes one")
        own = ListEditor(device_key(folder), listed_in(cluster), cluster.secret)
        changed = cluster.adopt(change(own), own.device)
        write_cluster(folder, changed)
        return changed

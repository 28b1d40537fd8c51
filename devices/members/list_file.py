"""The file of the list of members, which all processes of a device share."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from edge_run.base.errors import MeshError, reason_of
from edge_run.devices.members.cluster import Cluster, members_path, read_cluster, usable_cluster, write_cluster
from edge_run.devices.members.identity import brief_lock, device_key
from edge_run.devices.members.list_changes import ListEditor
from edge_run.devices.members.member_list import MOST_BYTES, MemberList

logger = logging.getLogger(__name__)

CLOSE_S, RETRY_S = 10.0, 60.0
_LOCK_FILE = "cluster.lock"


class ListFile:
    """The file in `folder`, as one process reads and writes it.

    It is written on a thread of its own: until a slow card has it for good, seconds may pass.
    """

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self._folder, self._path = folder, members_path(folder, cluster.id)
        self._seen = self._stamp()
        self._unkept: Cluster | None = None
        self._retry_s = 0.0  # until when it cannot be written, as on a full drive
        self._writer: threading.Thread | None = None

    def changed(self) -> bytes | None:
        """Return what another process wrote since the last look; None where nothing was, or this one writes."""
        if self._is_writing():
            return None
        stamp = self._stamp()
        if stamp == self._seen:
            return None
        try:
            with self._path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError:  # at the next look, then
            return None
        self._seen = stamp
        return content

    def keep(self, cluster: Cluster) -> None:
        """Have the list of `cluster`, and its secret, written, unless the file has a newer one.

        Nothing is waited for: while another process changes the list, it is left for the next look at it. Failures are
        logged, and it is tried again in a minute.
        """
        self._unkept, self._retry_s = cluster, 0.0
        self._is_writing()

    def close(self) -> None:
        """Wait until what is to be kept is written. Idempotent."""
        if self._writer is not None:
            self._writer.join(CLOSE_S)
        if self._writer is None or not self._writer.is_alive():
            self._write()

    def _is_writing(self) -> bool:
        """Return whether this process writes now, having begun to where something is to be kept."""
        if self._writer is not None and self._writer.is_alive():
            return True
        if self._unkept is None or time.monotonic() < self._retry_s:
            return False
        writer = threading.Thread(target=self._write, name="edge-run members", daemon=True)
        with contextlib.suppress(RuntimeError):  # there are no more threads: at the next look, or at the end
            writer.start()
            self._writer = writer
        return writer.is_alive()

    def _write(self) -> None:
        cluster = self._unkept
        if cluster is None:
            return
        try:
            with brief_lock(self._folder / _LOCK_FILE, is_patient=False):
                known = read_cluster(self._folder)
                if known is None or (known.id, known.founder) != (cluster.id, cluster.founder):
                    pass  # this device left the cluster meanwhile
                elif known.listed.order < cluster.listed.order:
                    changed = dataclasses.replace(known, listed=cluster.listed, secret=cluster.secret)
                    write_cluster(self._folder, changed)
                    self._seen = self._stamp()
        except BlockingIOError:
            return
        except (MeshError, OSError) as error:
            logger.warning("the list of members is not kept, which is tried again in %.0f s: %s", RETRY_S, error)
            self._retry_s = time.monotonic() + RETRY_S
            return
        if self._unkept is cluster:  # else a newer one came meanwhile
            self._unkept = None

    def _stamp(self) -> tuple[int, ...]:
        try:
            status = os.stat(self._path)
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_size


def change_list(folder: Path, change: Callable[[ListEditor], MemberList]) -> Cluster:
    """Change the list that is kept in `folder`, and return the cluster with it. Raises MeshError, NotTrusted."""
    with brief_lock(folder / _LOCK_FILE):
        cluster = read_cluster(folder)
        if cluster is None:
            raise MeshError("mesh: this device belongs to none; `edge-run mesh init` makes one")
        device = device_key(folder)
        cluster = cluster.adopt(cluster.listed, device)  # where writing was broken off, the file has an older secret
        changed = cluster.adopt(change(ListEditor(device, cluster.listed, cluster.secret)), device)
        write_cluster(folder, changed)
        return changed


def keep_cluster(folder: Path, made_of: Callable[[Cluster | None], Cluster]) -> Cluster:
    """Return what `made_of` makes of the cluster that is kept in `folder`, which is kept there from then on.

    No other process changes it in between. Where nothing is new, nothing is written, also where nothing can be. Raises
    MeshError, NotTrusted, and what `made_of` raises, which may be called twice.
    """
    known = usable_cluster(folder)
    if known is not None and made_of(known) == known:
        return known
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with brief_lock(folder / _LOCK_FILE):
            known = usable_cluster(folder)
            cluster = made_of(known)
            if cluster != known:
                write_cluster(folder, cluster)
            return cluster
    except OSError as error:
        raise MeshError(f"{folder}: the cluster cannot be kept ({reason_of(error)})") from error

"""What is wrong with the files a run needs: its folder for small files, and the model."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from edge_run.base.errors import EdgeRunError, reason_of
from edge_run.base.files.drafts import abandoned_drafts
from edge_run.base.units import MIB, format_size
from edge_run.devices.host.findings import NOTE, OK, PROBLEM, Finding
from edge_run.devices.host.mount import IN_MEMORY, find_mount
from edge_run.devices.host.system_files import system_text
from edge_run.runtime.inspection.model_kind import is_encoder
from edge_run.tiers import _libc
from edge_run.tiers.drives.copy_check import check_copy, find_copies
from edge_run.tiers.drives.page_cache import PageCache
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.source import SourceFile

LEAST_FREE_BYTES = 256 * MIB
LEAST_HOLE_BYTES = MIB
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "ceph", "glusterfs", "fuse.sshfs", "fuse.rclone")


def check_frames() -> Finding:
    """Whether memory can be used as this needs it."""
    reason = _libc.why_unavailable()
    if reason:
        text = f"cannot be used: {reason}; llama.cpp's own loader runs models, and no budget is kept"
        advice = "a newer kernel, or a container that allows mremap and memfd_create"
        return Finding("page frames", PROBLEM, text, advice)
    return Finding("page frames", OK, "can be moved")


def check_cache_folder(folder: Path) -> list[Finding]:
    """Whether what is found out can be kept, in a folder that is made when it is missing."""
    topic, advice = "cache folder", "name another one with --cache-dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="doctor-") as file:
            file.write(bytes(_libc.PAGE))
            file.flush()
            is_direct = _reads_directly(Path(file.name))
        free_bytes = shutil.disk_usage(folder).free
    except (OSError, EdgeRunError) as error:
        reason = reason_of(error)
        return [Finding(topic, PROBLEM, f"{folder}: cannot be written ({reason})", advice)]
    text = f"{folder}: writable, {format_size(free_bytes)} free"
    findings = [Finding(topic, OK, text)]
    if free_bytes < LEAST_FREE_BYTES:
        findings = [Finding(topic, NOTE, f"{text}, which is little", advice)]
    elif _mount(folder)[1] in IN_MEMORY:
        findings = [Finding(topic, NOTE, f"{text}, in memory: its files take some", advice)]
    elif not is_direct:
        findings = [Finding(topic, NOTE, f"{text}; models kept there are read through the page cache", advice)]
    return findings + list(_left_over(folder))


def _left_over(folder: Path) -> Iterator[Finding]:
    """Yield what demos have left in the cache folder."""
    for path in sorted(folder.glob("demo-*")):
        with contextlib.suppress(OSError):  # a demo removed it just now
            text = f"{path}: {format_size(sum(file.stat().st_size for file in path.glob('*')))}"
            yield Finding(
                "left over", NOTE, f"{text}, kept by a demo or left by one", shlex.join(["rm", "-r", str(path)])
            )


def left_over_drafts(path: Path) -> Iterator[Finding]:
    """Yield what programs that were killed left beside the model at `path`, as large as what they were writing."""
    for draft in abandoned_drafts(path.parent):
        with contextlib.suppress(OSError):  # another program removed it just now
            text = f"{draft}: {format_size(draft.stat().st_size)}, left by a program that was killed"
            yield Finding("left over", NOTE, text, shlex.join(["rm", "-r", str(draft)]))


def check_model(path: Path, gguf: GgufModel, error: str) -> Finding:
    """What the model is. error: what llama.cpp has against it, from its headers."""
    files = "" if len(gguf.shards) == 1 else f" in {len(gguf.shards)} files"
    text = f"{path}: {gguf.architecture}, {format_size(gguf.data_bytes)} of weights{files}"
    if error:
        advice = "get the file again, or one of an architecture that this llama.cpp knows"
        return Finding("model", PROBLEM, f"{text}; llama.cpp refuses it: {error}", advice)
    makes = "; an encoder: `edge-run embed` and `edge-run serve` make vectors with it" if is_encoder(gguf) else ""
    return Finding("model", OK, f"{text}{makes}")


def check_size(weights_bytes: int, budget_bytes: int) -> Finding:
    """Whether the model streams for its weights alone; what else it takes, a plan says."""
    text = f"its weights alone take {format_size(weights_bytes)} of the budget of {format_size(budget_bytes)}"
    rest = "it will be streamed" if weights_bytes >= budget_bytes else "`edge-run plan` says whether all of it fits"
    return Finding("size", OK, f"{text}: {rest}")


def check_holes(path: Path, start: int) -> list[Finding]:
    """Whether parts of the file were never written, as by a download that is not finished: they read as zeros."""
    if not hasattr(os, "SEEK_HOLE"):
        return []
    holes = []
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        while start < size:
            hole = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            try:
                start = os.lseek(file.fileno(), hole, os.SEEK_DATA) if hole < size else size
            except OSError:  # no data after it
                start = size
            holes.append((start - hole, hole))
    missing_bytes = sum(length for length, _ in holes)
    if missing_bytes < LEAST_HOLE_BYTES:
        return []
    text = f"{path}: {format_size(missing_bytes)} of it were never written, the first at byte {holes[0][1]}"
    return [Finding("holes", PROBLEM, text, "finish the download, or get the file again")]


def check_page_cache(folder: Path) -> Finding:
    """Whether a model that was run a moment ago can be read from memory."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(_libc.PAGE))
        file.flush()
        cache = PageCache(file.fileno())
        cache.close()
    if not cache.way:
        text = "the kernel does not say what is in the page cache: a model that fits is read from the drive each time"
        return Finding("page cache", NOTE, text, "Linux 6.5 or later, or a container that allows cachestat or mincore")
    return Finding("page cache", OK, f"the kernel says what is there ({cache.way}): second starts are read from it")


def check_drive(path: Path, root: Path = Path("/")) -> list[Finding]:
    """What the model is read from."""
    device, file_system = _mount(path)
    is_direct = _reads_directly(path)
    where = f"{path}: on {file_system or 'an unknown file system'}{f' ({device})' if device else ''}"
    move = "copy the model to a local solid state drive"
    if file_system in IN_MEMORY:
        return [Finding("drive", NOTE, f"{where}: the file takes memory itself", move)]
    if file_system in NETWORK:
        return [Finding("drive", NOTE, f"{where}: over a network or from a host", move)]
    findings = []
    if not is_direct:
        findings.append(Finding("drive", NOTE, f"{where}: no direct reads, so they are buffered, and slower", move))
    if is_rotational(os.stat(path).st_dev, root):
        findings.append(Finding("drive", NOTE, f"{where}, a rotating disk", move))
    return findings or [Finding("drive", OK, f"{where}, read directly")]


def check_second_drive(gguf: GgufModel, also: Path) -> list[Finding]:
    """Whether `also` is a copy of the model, on a drive that is worth reading too."""
    advice = "copy the model again, to another drive"
    try:
        copies = find_copies(gguf, also)
        for shard, copy in zip(gguf.shards, copies, strict=True):
            check_copy(shard, copy)
    except EdgeRunError as error:
        return [Finding("also", PROBLEM, str(error), advice)]
    if os.stat(copies[0]).st_dev == os.stat(gguf.shards[0].path).st_dev:
        text = f"{copies[0]}: on the file system of {gguf.shards[0].path}: reading both gains nothing"
        return [Finding("also", NOTE, text, advice)]
    what = "lengths, headers and samples of the weights are the model's"
    return [Finding("also", OK, f"{copies[0]}: {what}"), *check_drive(copies[0])]


def is_rotational(device: int, root: Path = Path("/")) -> bool:
    """Return whether the drive with this number rotates; of a virtual one the kernel says so, and nobody knows."""
    folder = (root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}").resolve()
    if "virtio" in str(folder):
        return False
    for queue in (folder / "queue", folder.parent / "queue"):  # of a drive, or of the one it is a part of
        if said := system_text(queue / "rotational"):
            return said == "1"
    return False


def _mount(path: Path) -> tuple[str, str]:
    """Return the device and the type of the file system that holds `path`; empty where that cannot be told."""
    try:
        mount = find_mount(path)
    except OSError:
        return "", ""
    return mount.device, mount.file_system


def _reads_directly(path: Path) -> bool:
    with contextlib.closing(SourceFile(path)) as source:
        return source.is_direct

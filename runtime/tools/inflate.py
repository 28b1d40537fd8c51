"""Grows a small trained GGUF to a chosen size without changing what it computes, to have something to stream.

*Wider*: every feed-forward network (in a mixture of experts, every expert) gets neurons whose gate and up rows are
noise and whose down columns are exact zeros: they cost bytes and multiplications, and add nothing. *Deeper*: added
layers are noise with zeros for the attention's output and for the down projection, so that what enters a layer leaves
it unchanged; they are spread evenly before the trained ones and share norms and router with the trained layer after.
The last layer stays the last: llama.cpp computes part of that one for fewer tokens, and bits depend on how many.

Trained weights are copied as they are stored, each in its own type; what is added has the type of what it is added to,
and an added layer the types of the trained layer after. Embeddings, the output matrix and all else around the layers
are copied. What can be grown is `inflate_source.py`'s business, what the bytes are `inflate_blocks.py`'s; here is the
plan of the new file, and its writing.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import ConfigError, NotSupported, option, system_errors
from edge_run.base.files.identity import check_path
from edge_run.base.files.whole import check_room
from edge_run.base.units import format_size, parse_size, round_up
from edge_run.devices.host.target_file import TargetFile, check_target, opened, written
from edge_run.runtime.tools.inflate_blocks import Filler, GrownTensor, tensor_pieces
from edge_run.runtime.tools.inflate_source import ROLES, InflateSource, Role, read_source
from edge_run.tiers.gguf_format import MAGIC, SCALARS
from edge_run.tiers.gguf_header import MOST_LAYERS, ArrayValue

MAX_WIDTH = (1 << 31) - 32


@dataclass(frozen=True, slots=True)
class Growth:
    """The file to write: `head` (header and padding), then `tensors`, each padded to the source's alignment."""

    head: bytes
    tensors: tuple[GrownTensor, ...]
    size_bytes: int


@system_errors("writing the larger model")
def inflate(
    source: str | Path,
    target: str | Path,
    size_bytes: int | str,
    layers: int | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    *,
    is_overwritten: bool = False,
) -> Path:
    """Write `source`, grown to the largest size that is not above `size_bytes`, to `target`; return where that is.

    Args:
        source: a GGUF that `read_source` takes.
        target: appears whole or not at all. Its folder exists.
        size_bytes: from the source's own size on, a number or text (`64MiB`).
        layers: how many the result has, from the source's own number (the default) on.
        seed: of the noise, 0 or more; the same seed gives the same bytes (with the same numpy and llama.cpp).
        progress: called after each piece of a few MiB with the bytes written and the bytes in all.
        is_overwritten: a `target` that exists is replaced.

    Raises ConfigError for a size, a seed or a number of layers that cannot be, and for a target that exists, is the
    source itself or has no folder; NotSupported for another kind of model, ModelFileError for a source that is broken
    or changes meanwhile, TierReadError when the disk is too small or fails.
    Any exception, also one that `progress` raises and Ctrl-C, leaves no file behind. It holds a few MiB, whatever the
    size.
    """
    source, target = Path(source), Path(target)
    if seed < 0:
        raise ConfigError(f"seed {seed}: must be 0 or more")
    model = read_source(source)
    growth = plan_growth(model, parse_size(size_bytes), layers)
    target = check_target(target, [source], "the model to grow itself", is_overwritten)
    check_room(target, growth.size_bytes, "a smaller size or another folder")
    size = format_size(growth.size_bytes)
    with written(target, growth.size_bytes, size, source, is_replacing=is_overwritten) as file:
        _write(growth, model, file, seed, progress)
    return target


def plan_growth(source: InflateSource, size_bytes: int, layers: int | None = None) -> Growth:
    """Return the file with `layers` layers that is as wide as `size_bytes` allows. Raises like `inflate`."""
    n_trained = len(source.layers)
    n_layers = n_trained if layers is None else layers
    if not n_trained <= n_layers <= MOST_LAYERS:
        raise ConfigError(
            f"{n_layers:,} layers: the model has {n_trained}, llama.cpp takes up to {MOST_LAYERS}; ask for a number "
            "between these",
            found=n_layers,
            needed=n_trained,
        )
    if n_layers > n_trained and any(
        isinstance(value, ArrayValue) and key.startswith(f"{source.architecture}.")
        for key, value in source.header.metadata.items()
    ):
        raise NotSupported(
            f"{source.header.shard.path}: has settings for each layer, none can be added; leave out {option('layers')}"
        )
    narrowest = _plan_width(source, n_layers, source.width)
    if size_bytes < narrowest.size_bytes:
        raise ConfigError(
            f"size {size_bytes:,} bytes: with {n_layers} layers the model takes at least {narrowest.size_bytes:,} "
            f"({format_size(narrowest.size_bytes)}); ask for more",
            found_bytes=size_bytes,
            needed_bytes=narrowest.size_bytes,
        )
    many, step = 1024, source.width_step  # so many steps that padding does not matter to the slope
    wide = _plan_width(source, n_layers, source.width + many * step)
    steps = (size_bytes - narrowest.size_bytes) * many // (wide.size_bytes - narrowest.size_bytes)
    width = source.width + steps * step
    if width > MAX_WIDTH:
        raise ConfigError(
            f"size {size_bytes:,} bytes: {n_layers} layers would be {width:,} neurons wide, at most {MAX_WIDTH:,} are "
            "possible; ask for more layers",
            found=width,
            needed=MAX_WIDTH,
        )
    while (growth := _plan_width(source, n_layers, width)).size_bytes > size_bytes:
        width -= step
    return growth


def _plan_width(source: InflateSource, n_layers: int, width: int) -> Growth:
    tensors = [GrownTensor(tensor.name, tensor.shape, tensor, None, False) for tensor in source.before]
    trained_at = [(trained + 1) * n_layers // len(source.layers) - 1 for trained in range(len(source.layers))]
    for number in range(n_layers):
        trained = bisect_left(trained_at, number)
        is_added = trained_at[trained] != number
        for part, tensor in source.layers[trained].items():
            role, shape = ROLES[part], tensor.shape
            if role is Role.ROWS:
                shape = (shape[0], width, *shape[2:])
            elif role is Role.COLUMNS:
                shape = (width, *shape[1:])
            tensors.append(GrownTensor(f"blk.{number}.{part}", shape, tensor, role, is_added))
    tensors += [GrownTensor(tensor.name, tensor.shape, tensor, None, False) for tensor in source.after]
    alignment_bytes = source.header.alignment_bytes
    head = _head(source, tensors, {"block_count": n_layers, **dict.fromkeys(source.width_keys, width)})
    data_bytes = sum(round_up(tensor.size_bytes, alignment_bytes) for tensor in tensors)
    return Growth(head, tuple(tensors), len(head) + data_bytes)


def _head(source: InflateSource, tensors: list[GrownTensor], changes: dict[str, int]) -> bytes:
    """Return header and padding: the source's metadata with `changes`, by key without the architecture; `tensors`."""
    header, raw = source.header, source.raw_header
    parts = [MAGIC, struct.pack("<IQQ", header.version, len(tensors), len(header.entries))]
    for entry in header.entries:
        part = raw[entry.start : entry.start + entry.size_bytes]
        suffix = entry.key.removeprefix(f"{source.architecture}.")
        if suffix != entry.key and suffix in changes:
            layout = SCALARS[entry.type_id]
            part = part[: -layout.size] + layout.pack(changes[suffix])
        parts.append(part)
    offset = 0
    for tensor in tensors:
        name, shape = tensor.name.encode(), tensor.shape
        parts.append(struct.pack("<Q", len(name)) + name)
        parts.append(struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, tensor.source.type_id, offset))
        offset += round_up(tensor.size_bytes, header.alignment_bytes)
    head = b"".join(parts)
    return head.ljust(round_up(len(head), header.alignment_bytes), b"\0")


def _write(
    growth: Growth, source: InflateSource, file: TargetFile, seed: int, progress: Callable[[int, int], None] | None
) -> None:
    filler, alignment_bytes = Filler(seed), source.header.alignment_bytes
    with opened(source.header.shard.path) as trained:
        done_bytes = file.write(growth.head)
        for tensor in growth.tensors:
            for piece in tensor_pieces(tensor, trained, filler):
                done_bytes += file.write(piece)
                if progress:
                    progress(done_bytes, growth.size_bytes)
            done_bytes += file.write(bytes(-tensor.size_bytes % alignment_bytes))
        assert done_bytes == growth.size_bytes
    shard = source.header.shard
    check_path(shard.path, shard.identity)  # since its header was read: it was copied for minutes

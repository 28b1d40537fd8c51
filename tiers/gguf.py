"""Models as GGUF files describe them: metadata, and where each tensor's bytes lie, over one file or several shards.

Only headers are read, through a small window, because a mapping would count towards this process's memory. Metadata
arrays (vocabularies, merges) are skipped, and tensor data is never read. `tiers/gguf_header.py` reads a single file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import ModelFileError, ModelFileMissing
from edge_run.base.files.identity import check_path
from edge_run.tiers.gguf_header import ArrayValue, Header, MetadataEntry, MetadataValue, Shard, TensorInfo, read_header

MAX_ARCHITECTURE_LETTERS = 64  # it is part of the name of every other value, and of messages
_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A whole model.

    shards: its files, in order.
    tensors: its tensors, in file order.
    metadata: the first shard's metadata, by key.
    entries: the same entries, with their places in the file.
    """

    shards: tuple[Shard, ...]
    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, MetadataValue]
    entries: tuple[MetadataEntry, ...] = ()

    @property
    def architecture(self) -> str:
        """The architecture, as llama.cpp names it, such as `llama` or `qwen3moe`."""
        return str(self.metadata["general.architecture"])

    @property
    def data_bytes(self) -> int:
        """The bytes of all tensors, without padding."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def is_mixture(self) -> bool:
        """Whether it has experts."""
        return bool(self.value("expert_count"))

    @property
    def used_experts(self) -> int:
        """The experts that a token uses in a layer, at most; 1 where the file does not say."""
        value = self.value("expert_used_count")
        number = value.largest if isinstance(value, ArrayValue) else value
        return number if isinstance(number, int) and number > 0 else 1

    def value(self, suffix: str) -> MetadataValue | None:
        """Return the metadata value of `<architecture>.<suffix>`, or None when the model has none."""
        return self.metadata.get(f"{self.architecture}.{suffix}")

    def check_unchanged(self) -> None:
        """Raise ModelFileError when a file is not the one any more whose header was read."""
        for shard in self.shards:
            check_path(shard.path, shard.identity)


def read_gguf(path: Path) -> GgufModel:
    """Return the model whose only or first file is `path`; other shards are found by name, in the same folder.

    Reads headers only, and leaves nothing open. Raises ModelFileError when a file is missing, unreadable, no GGUF,
    broken or truncated, or when the shards do not make one model; TierReadError when the disk fails.
    """
    first = read_header(path)
    paths = _shard_paths(first)
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError(f"{path}: no text under general.architecture, which llama.cpp needs; get another file")
    if len(architecture) > MAX_ARCHITECTURE_LETTERS:
        raise ModelFileError(
            f"{path}: general.architecture has {len(architecture):,} letters, at most {MAX_ARCHITECTURE_LETTERS} make "
            "sense; get another file",
            found=len(architecture),
            needed=MAX_ARCHITECTURE_LETTERS,
        )
    headers = [first]
    for shard in range(1, len(paths)):
        headers.append(_read_later_shard(paths[shard], path, shard, len(paths)))
    _check_together(headers)
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    return GgufModel(tuple(header.shard for header in headers), tensors, first.metadata, first.entries)


def _split_count(header: Header) -> int:
    return max(1, _split_number(header, "split.count", default=1))


def _split_number(header: Header, key: str, default: int | None = None) -> int:
    """Return the integer under `key`, or `default` where there is none; ModelFileError when it is no integer."""
    value = header.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelFileError(
            f"{header.shard.path}: broken split: {key} is {value!r:.100}, an integer is needed; download the model "
            "again",
        )
    return value


def _shard_paths(first: Header) -> list[Path]:
    """Return the paths of all shards; ModelFileError when `first` is a later one, or is not named as a shard."""
    path, count = first.shard.path, _split_count(first)
    if count == 1:
        return [path]
    number = _split_number(first, "split.no", default=0)
    name = _SHARD_NAME.fullmatch(path.name)
    if number != 0:
        prefix = name["prefix"] if name else "<model>"
        raise ModelFileError(
            f"{path}: shard {number + 1} of {count}, the first is needed; open {prefix}-00001-of-{count:05}.gguf",
            found=number + 1,
            needed=1,
        )
    if not name or (int(name["number"]), int(name["count"])) != (1, count):
        raise ModelFileError(
            f"{path}: the first of {count} shards under another name, the others cannot be found; rename it to "
            f"<model>-00001-of-{count:05}.gguf",
            needed=count,
        )
    return [path.with_name(f"{name['prefix']}-{shard:05}-of-{count:05}.gguf") for shard in range(1, count + 1)]


def _read_later_shard(path: Path, first: Path, shard: int, count: int) -> Header:
    if not path.exists():
        raise ModelFileMissing(
            f"{path}: missing: shard {shard + 1} of {count} that {first.name} needs; put all shards in one folder",
            found=shard,
            needed=count,
        )
    header = read_header(path, shard)
    found = _split_number(header, "split.no", default=0), _split_count(header)
    if found != (shard, count):
        raise ModelFileError(
            f"{path}: of another model than {first.name}: inside it is shard {found[0] + 1} of {found[1]}, shard "
            f"{shard + 1} of {count} is needed; download the shards of one model again",
        )
    return header


def _check_together(headers: list[Header]) -> None:
    """Refuse shards that hold a tensor twice, or not the number of tensors that the first one promises."""
    homes: dict[str, Path] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in homes:
                raise ModelFileError(
                    f"{header.shard.path}: tensor {tensor.name!r} is also in {homes[tensor.name].name}: shards of "
                    "different models; download the shards of one model again",
                )
            homes[tensor.name] = header.shard.path
    if len(headers) > 1:
        promised = _split_number(headers[0], "split.tensors.count")
        if promised != len(homes):
            raise ModelFileError(
                f"{headers[0].shard.path}: {len(headers)} shards hold {len(homes):,} tensors, split.tensors.count says "
                f"{promised:,}: shards of different models; download the shards of one model again",
                found=len(homes),
                needed=promised,
            )

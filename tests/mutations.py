"""Model files broken in every way that one can think of: a GGUF file as parts, and changes to them by chance.

`mutate` takes a model file and a random source, and writes a broken copy; `mutate_shards` the same of a split model.
Each says what it did. Layout is kept whole where the change is not to the layout itself, so that what is broken is met
as deep inside as can be.
"""

from __future__ import annotations

import contextlib
import math
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_run.tiers.gguf_format import ARRAY, SCALARS, STRING, TENSOR_TYPES

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
LARGE = (0, 1, 2, 3, 7, 255, 65_535, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
SMALL = (-1, -(2**31), -(2**63))
FLOATS = (0.0, -1.0, 1e-45, 1e38, math.inf, -math.inf, math.nan)
BITS = {0: 8, 1: 8, 2: 16, 3: 16, 4: 32, 5: 32, 10: 64, 11: 64}
PAD = 32


@dataclass
class Entry:
    """A metadata entry; of an array, `value` is a list and `element` its type."""

    key: str
    kind: int
    value: Any
    element: int = 0


@dataclass
class Tensor:
    """A tensor and its bytes."""

    name: str
    shape: list[int]
    kind: int
    data: bytes
    offset: int | None = None


@dataclass
class Parts:
    """A file: what `write` puts together again."""

    entries: list[Entry]
    tensors: list[Tensor]
    version: int = 3

    def entry(self, key: str) -> Entry | None:
        return next((entry for entry in self.entries if entry.key == key), None)

    def write(self) -> bytes:
        head = [b"GGUF", struct.pack("<IQQ", self.version, len(self.tensors), len(self.entries))]
        head += [_text(e.key) + U32.pack(e.kind) + _value(e) for e in self.entries]
        place, data = 0, []
        for tensor in self.tensors:
            sizes = b"".join(U64.pack(n % 2**64) for n in tensor.shape)
            offset = place if tensor.offset is None else tensor.offset
            head.append(_text(tensor.name) + U32.pack(len(tensor.shape)) + sizes + U32.pack(tensor.kind))
            head.append(U64.pack(offset % 2**64))
            padded = tensor.data + b"\0" * (-len(tensor.data) % PAD)
            data.append(padded)
            place += len(padded)
        header = b"".join(head)
        return header + b"\0" * (-len(header) % PAD) + b"".join(data)


def _text(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogateescape")
    return U64.pack(len(data)) + data


def _one(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind in BITS:
        return (int(value) & (2 ** BITS[kind] - 1)).to_bytes(BITS[kind] // 8, "little")
    return SCALARS[kind].pack(value)


def _value(entry: Entry) -> bytes:
    if entry.kind != ARRAY:
        return _one(entry.kind, entry.value)
    head = U32.pack(entry.element) + U64.pack(len(entry.value))
    return head + b"".join(_one(entry.element, value) for value in entry.value)


def parse(raw: bytes) -> Parts:
    """Return the parts of a sound file whose alignment is the usual one."""
    at = 4

    def take(layout: struct.Struct) -> Any:
        nonlocal at
        (value,) = layout.unpack_from(raw, at)
        at += layout.size
        return value

    def text() -> bytes:
        nonlocal at
        size = take(U64)
        at += size
        return raw[at - size : at]

    def one(kind: int) -> Any:
        return text() if kind == STRING else take(SCALARS[kind])

    version, n_tensors, n_entries = take(U32), take(U64), take(U64)
    entries = []
    for _ in range(n_entries):
        key, kind = text().decode(), take(U32)
        if kind == ARRAY:
            element, count = take(U32), take(U64)
            entries.append(Entry(key, kind, [one(element) for _ in range(count)], element))
        else:
            entries.append(Entry(key, kind, one(kind)))
    heads = []
    for _ in range(n_tensors):
        name = text().decode()
        shape = [take(U64) for _ in range(take(U32))]
        heads.append((name, shape, take(U32), take(U64)))
    start = at + -at % PAD
    tensors = []
    for name, shape, kind, offset in heads:
        size = TENSOR_TYPES[kind].size_bytes(math.prod(shape))
        tensors.append(Tensor(name, shape, kind, raw[start + offset : start + offset + size]))
    return Parts(entries, tensors, version)


# Changes to the parts: each takes the parts and a random source, and says what it did.

_VOCABULARY = "tokenizer."


def _hyperparameter(parts: Parts, chance: random.Random) -> str:
    shape = [e for e in parts.entries if e.kind in SCALARS and not e.key.startswith(("general.", _VOCABULARY))]
    entry = chance.choice(shape)
    old = entry.value
    if entry.kind in BITS:
        near = [old + 1, old - 1, old * 2, old // 2, old * 3]
        entry.value = chance.choice([*near, *near, *LARGE, *SMALL])
    elif entry.kind == 7:
        entry.value = not old
    else:
        entry.value = chance.choice([*FLOATS, old * 1e6, -old])
        if entry.kind == 6 and math.isfinite(entry.value):
            entry.value = min(max(entry.value, -3e38), 3e38)
    return f"{entry.key} {old} -> {entry.value}"


def _hyperparameter_type(parts: Parts, chance: random.Random) -> str:
    entry = chance.choice([e for e in parts.entries if not e.key.startswith("general.alignment")])
    old = entry.kind
    kind = chance.choice([kind for kind in (*SCALARS, STRING, ARRAY) if kind != old])
    if kind == ARRAY:
        count = chance.choice([0, 1, 3, 4, 600])
        entry.element = chance.choice([4, 5, 6, 7, STRING])
        filler: Any = b"x" if entry.element == STRING else 1
        entry.value = [filler] * count
    elif kind == STRING:
        entry.value = chance.choice([b"", b"x", b"linear", b"llama"])
    else:
        entry.value = chance.choice([0, 1, 2, 4])
    entry.kind = kind
    return f"{entry.key} of type {old} -> {kind}"


def _added_hyperparameter(parts: Parts, chance: random.Random) -> str:
    name = str((parts.entry("general.architecture") or parts.entries[0]).value, "utf-8")
    suffix, kind = chance.choice(
        [
            ("attention.sliding_window", 4), ("attention.key_length", 4), ("attention.value_length", 4),
            ("rope.dimension_count", 4), ("rope.freq_base", 6), ("rope.scaling.factor", 6), ("attention.scale", 6),
            ("expert_count", 4), ("expert_used_count", 4), ("expert_group_count", 4), ("expert_group_used_count", 4),
            ("leading_dense_block_count", 4), ("nextn_predict_layers", 4), ("vocab_size", 4), ("logit_scale", 6),
            ("attention.max_alibi_bias", 6), ("attention.clamp_kqv", 6), ("expert_weights_scale", 6),
            ("expert_gating_func", 4), ("attention.causal", 7), ("pooling_type", 4), ("rope.scaling.type", STRING),
            ("embedding_length_out", 4), ("attention.layer_norm_rms_epsilon", 6), ("attention.group_norm_groups", 4),
        ]
    )  # fmt: skip
    value: Any = chance.choice(LARGE if kind == 4 else FLOATS)
    value = chance.choice([True, False]) if kind == 7 else value
    value = chance.choice([b"yarn", b"linear", b"longrope", b"nothing"]) if kind == STRING else value
    parts.entries = [entry for entry in parts.entries if entry.key != f"{name}.{suffix}"]
    parts.entries.append(Entry(f"{name}.{suffix}", kind, value))
    return f"{name}.{suffix} = {value} added"


def _dropped_entry(parts: Parts, chance: random.Random) -> str:
    entry = chance.choice(parts.entries)
    parts.entries.remove(entry)
    return f"no {entry.key}"


def _architecture(parts: Parts, chance: random.Random) -> str:
    names = ["gpt2", "mamba", "qwen3moe", "bert", "t5", "clip", "gemma2", "deepseek2", "llama4", "rwkv7", "lama", ""]
    entry = parts.entry("general.architecture")
    assert entry
    old, new = str(entry.value, "utf-8"), chance.choice(names)
    entry.value = new.encode()
    for other in parts.entries:
        if other.key.startswith(f"{old}."):
            other.key = new + other.key[len(old) :]
    return f"architecture {old} -> {new}"


def _vocabulary(parts: Parts, chance: random.Random) -> str:
    entries = [entry for entry in parts.entries if entry.key.startswith(_VOCABULARY)]
    entry = chance.choice(entries)
    if entry.kind != ARRAY:
        if entry.kind == STRING:
            entry.value = chance.choice([b"", b"gpt2", b"llama", b"bert", b"t5", b"rwkv", b"plamo2", b"none", b"\xff"])
        else:
            entry.value = chance.choice([*LARGE, *SMALL])
            entry.value %= 2 if entry.kind == 7 else 2**64
        return f"{entry.key} = {entry.value!r}"
    how = chance.choice(["shorter", "empty", "longer", "one changed", "repeated", "shuffled"])
    if how in ("shorter", "longer"):
        entry.value = entry.value[: chance.randrange(len(entry.value))] if how == "shorter" else entry.value * 2
    elif how == "empty":
        entry.value = []
    elif how == "shuffled":
        chance.shuffle(entry.value)
    else:
        bad = {STRING: [b"", b"\xff\xfe", b"a" * 5000, b"no merge at all", b" ", b"<0x", b"\xc4\xa0"], 6: FLOATS}
        value = chance.choice(bad.get(entry.element, [0, 1, 2, 3, 6, 7, 255, -1]))
        places = range(len(entry.value)) if how == "repeated" else [chance.randrange(len(entry.value))]
        for place in places:
            entry.value[place] = value
    return f"{entry.key} {how}"


def _tensor_type(parts: Parts, chance: random.Random) -> str:
    tensor = chance.choice(parts.tensors)
    old = tensor.kind
    tensor.kind = chance.choice([kind for kind in (*TENSOR_TYPES, 4, 43, 255, 2**31) if kind != old])
    if kind := TENSOR_TYPES.get(tensor.kind):
        size = math.prod(tensor.shape) // kind.block_elements * kind.block_bytes
        tensor.data = tensor.data[:size].ljust(size, b"\0")
    return f"{tensor.name} of type {old} -> {tensor.kind}"


def _tensor_shape(parts: Parts, chance: random.Random) -> str:
    tensor = chance.choice(parts.tensors)
    old = list(tensor.shape)
    how = chance.randrange(5)
    if how == 0:
        tensor.shape.reverse()
    elif how == 1:
        tensor.shape = [math.prod(old)]
    elif how == 2:
        tensor.shape.append(chance.choice([0, 1, 2]))
    elif how == 3:
        place = chance.randrange(len(old))
        tensor.shape[place] = chance.choice([old[place] * 2, old[place] // 2, old[place] + 32, 0, 1, 32, 256])
    else:
        tensor.shape[chance.randrange(len(old))] = chance.choice(LARGE)
    kind = TENSOR_TYPES[tensor.kind]
    size = min(math.prod(tensor.shape) // kind.block_elements * kind.block_bytes, 1 << 24)
    tensor.data = tensor.data[:size].ljust(size, b"\0")
    return f"{tensor.name} of shape {old} -> {tensor.shape}"


def _tensor_name(parts: Parts, chance: random.Random) -> str:
    one, other = chance.sample(parts.tensors, 2)
    how = chance.randrange(4)
    if how == 0:
        one.name, other.name = other.name, one.name
        return f"{one.name} and {other.name} with names swapped"
    old = one.name
    one.name = [other.name, "", "x" * chance.choice([63, 64]), old + "s"][chance.randrange(4)]
    return f"{old} renamed to {one.name[:40]}"


def _tensors(parts: Parts, chance: random.Random) -> str:
    tensor = chance.choice(parts.tensors)
    how = chance.choice(["missing", "twice", "elsewhere", "shuffled", "of random bytes"])
    if how == "missing":
        parts.tensors.remove(tensor)
    elif how == "twice":
        parts.tensors.append(Tensor(tensor.name, tensor.shape, tensor.kind, tensor.data))
    elif how == "elsewhere":
        tensor.offset = chance.choice([*LARGE, 32, 64, 4096])
    elif how == "shuffled":
        chance.shuffle(parts.tensors)
    else:
        tensor.data = chance.randbytes(len(tensor.data))
    return f"{tensor.name} {how}"


def _duplicate_entry(parts: Parts, chance: random.Random) -> str:
    entry = chance.choice(parts.entries)
    parts.entries.insert(chance.randrange(len(parts.entries)), entry)
    return f"{entry.key} twice"


STRUCTURAL: tuple[Callable[[Parts, random.Random], str], ...] = (
    _hyperparameter, _hyperparameter, _hyperparameter, _hyperparameter, _hyperparameter_type, _added_hyperparameter,
    _added_hyperparameter, _dropped_entry, _architecture, _vocabulary, _vocabulary, _tensor_type, _tensor_type,
    _tensor_shape, _tensor_shape, _tensor_name, _tensors, _duplicate_entry,
)  # fmt: skip


def _damage(raw: bytearray, header_bytes: int, chance: random.Random) -> str:
    """Change bytes where they stand."""
    how = chance.choice(["bits", "bits", "data", "cut", "count", "count", "block", "tail"])
    if how in ("bits", "data"):
        n, stop = chance.choice([1, 1, 2, 8]), header_bytes if how == "bits" else len(raw)
        for _ in range(n):
            raw[chance.randrange(0 if how == "bits" else header_bytes, stop)] ^= 1 << chance.randrange(8)
        return f"{n} bits of the {'header' if how == 'bits' else 'data'} flipped"
    if how == "cut":
        size = chance.choice([chance.randrange(header_bytes), chance.randrange(len(raw)), len(raw) - 1])
        del raw[size:]
        return f"cut to {size} bytes"
    if how == "count":
        at = chance.choice([8, 16, chance.randrange(24, header_bytes - 8)])
        value = chance.choice(LARGE)
        raw[at : at + 8] = U64.pack(value)
        return f"{value} written at {at}"
    if how == "block":
        one, other = sorted(chance.randrange(header_bytes) for _ in range(2))
        size = chance.choice([1, 8, 100])
        raw[one : one + size], raw[other : other + size] = raw[other : other + size], raw[one : one + size]
        return f"{size} bytes at {one} and {other} swapped"
    raw += chance.randbytes(chance.choice([1, 5000]))
    return "something behind the end"


def mutate(source: Path, target: Path, chance: random.Random) -> str:
    """Write a broken copy of the model `source` to `target`; return what is broken."""
    raw = source.read_bytes()
    if chance.random() < 0.25:
        damaged = bytearray(raw)
        parts = parse(raw)
        told = _damage(damaged, len(raw) - sum(len(t.data) + -len(t.data) % PAD for t in parts.tensors), chance)
        target.write_bytes(damaged)
        return told
    parts = parse(raw)
    told = ""
    while not told:
        with contextlib.suppress(IndexError):  # later shards lack most of what could be changed
            told = chance.choice(STRUCTURAL)(parts, chance)
    target.write_bytes(parts.write())
    return told


def mutate_shards(sources: Sequence[Path], others: Sequence[Path], folder: Path, chance: random.Random) -> str:
    """Write the shards `sources` to `folder`, as broken as `mutate` makes them, or mixed with `others`."""
    contents = [path.read_bytes() for path in sources]
    how = chance.choice(["swapped", "foreign", "missing", "count", "number", "repeated", "total", "one broken"])
    place = chance.randrange(len(contents))
    if how == "swapped":
        one, other = chance.sample(range(len(contents)), 2)
        contents[one], contents[other] = contents[other], contents[one]
    elif how == "foreign":
        contents[place] = others[place].read_bytes()
    elif how == "repeated":
        contents[place] = contents[chance.randrange(len(contents))]
    elif how in ("count", "number", "total"):
        key = {"count": "split.count", "number": "split.no", "total": "split.tensors.count"}[how]
        parts = parse(contents[place])
        entry = parts.entry(key)
        assert entry
        entry.value = chance.choice([*LARGE, *SMALL])
        contents[place] = parts.write()
    for path, content in zip(sources, contents, strict=True):
        (folder / path.name).write_bytes(content)
    if how == "one broken":
        return f"shard {place + 1}: {mutate(sources[place], folder / sources[place].name, chance)}"
    if how == "missing":
        (folder / sources[place].name).unlink()
    return f"shard {place + 1} {how}"


# Changes on purpose


def changed(source: Path, target: Path, key: str, value: float) -> Path:
    """Write `source` again with another value of `key`."""
    parts = parse(source.read_bytes())
    entry = parts.entry(key)
    assert entry is not None
    entry.value = value
    target.write_bytes(parts.write())
    return target


def deadly(source: Path, target: Path) -> Path:
    """Write a model over which llama.cpp ends the process when it computes."""
    return changed(source, target, "llama.attention.layer_norm_rms_epsilon", math.nan)

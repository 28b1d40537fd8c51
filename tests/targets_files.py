"""Files of models."""

from __future__ import annotations

import json
import os
import random
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

from edge_run.base.units import KIB, MIB
from hostile import broken_bytes
from hostile_target import Target, in_file, target


@target
def gguf_headers(folder: Path, stack: ExitStack) -> Target:
    """Headers of model files, each with as much behind it as a valid one has, or with a hole of a terabyte."""
    import copy

    import mutations
    from edge_run.base.errors import ModelFileError
    from edge_run.tiers.gguf import read_gguf
    from edge_run.tiers.gguf_format import ARRAY, MAX_STRING_BYTES, MAX_TEXT_BYTES, STRING

    entries = [
        mutations.Entry("general.architecture", STRING, b"llama"),
        mutations.Entry("llama.block_count", 4, 2),
        mutations.Entry("llama.rope.freq_base", 6, 10000.0),
        mutations.Entry("general.alignment", 4, 32),
        mutations.Entry("tokenizer.ggml.add_bos", 7, True),
        mutations.Entry("tokenizer.ggml.tokens", ARRAY, [b"x" * 40, b"", *[b"ab"] * 510, b"token"], STRING),
        mutations.Entry("tokenizer.ggml.scores", ARRAY, [0.5, -1.0], 6),
        mutations.Entry("tokenizer.chat_template", STRING, b"{{ messages }}" * 9),
    ]
    tensors = [
        mutations.Tensor(f"blk.{n}.{name}.weight", list(shape), kind, bytes(size))
        for n in range(2)
        for name, shape, kind, size in (("attn_q", (32, 4), 0, 512), ("ffn_up", (32, 2), 8, 68), ("norm", (7,), 1, 14))
    ]
    whole = mutations.Parts(entries, tensors)
    seed = whole.write()
    path = folder / "model.gguf"

    def feed(data: bytes) -> bool:
        path.write_bytes(data[1:])
        if data[:1] == b"\1":
            os.truncate(path, 1 << 40)
        return bool(read_gguf(path).tensors)

    def special(chance: random.Random) -> bytes:
        while True:
            parts = copy.deepcopy(whole)
            try:
                told = chance.choice(mutations.STRUCTURAL)(parts, chance)
            except (IndexError, AssertionError):
                continue
            if told:
                return bytes([chance.random() < 0.3]) + parts.write()

    most = MAX_TEXT_BYTES + MAX_STRING_BYTES  # what is kept, and a string once more while it is decoded
    return Target("gguf headers", feed, (ModelFileError,), [b"\0" + seed, b"\1" + seed], most, special=special)


@target
def packed_headers(folder: Path, stack: ExitStack) -> Target:
    """Heads and indexes of packed files, whose digest whoever breaks them on purpose makes right again."""
    from edge_run.base.errors import PackedFileError
    from edge_run.runtime.tools import pack as packing
    from edge_run.tiers import packed_file
    from packing import N_EXPERTS, model_of

    gguf = model_of(folder, [[(64, 20_000 * N_EXPERTS), (0, 20_000 * N_EXPERTS)]])
    patches = (
        mock.patch.object(packing, "MOST_SHARE", 9.0),
        mock.patch.object(packing, "read_gguf", return_value=gguf),
    )
    with patches[0], patches[1]:
        packing.pack(gguf.shards[0].path)
    path = packed_file.packed_path(gguf.shards[0].path)
    seed = path.read_bytes()
    _, _, start, n_index, _, _ = packed_file.HEAD.unpack_from(seed)
    index, table = seed[start : start + n_index], seed[start + n_index :]
    content = folder / "content"  # a hole in place of the blocks, whose content is not looked at

    def wrap(text: bytes, end: bytes = table) -> bytes:
        return packed_file.write_head(start, text, end) + text + end

    def feed(data: bytes) -> bool:
        with content.open("wb") as file:
            file.write(data[: packed_file.HEAD.size])
            file.seek(max(start, packed_file.HEAD.size))
            file.write(data[packed_file.HEAD.size :])
        found = packed_file.find_packed(gguf, content)
        assert found is not None
        assert 0 <= found.share < 9
        assert 0 < found.memory_bytes(4) < 16 * MIB
        return True

    def special(chance: random.Random) -> bytes:
        return wrap(index, broken_bytes(table, [table], chance))

    seeds, documents = [wrap(index)], [json.loads(index)]
    return Target("packed headers", feed, (PackedFileError,), seeds, 16 * MIB, documents, wrap, 256 * KIB, special)


@target
def route_traces(folder: Path, stack: ExitStack) -> Target:
    from io import StringIO

    from edge_run.base.errors import ModelFileError
    from edge_run.prefetch.routes import Route, RouteHeader, RouteReader, RouteWriter

    file = StringIO()
    writer = RouteWriter(file, RouteHeader({0: 1000, 1: 2000}, {0: 10, 1: 20}, "a model", "llama", 8, 2))
    writer.write(
        [
            Route(0, int(step > 3), step, layer, slot, (step + slot) % 8, 0.5)
            for step in range(6)
            for layer in range(2)
            for slot in range(2)
        ]
    )
    text = file.getvalue()
    lines = text.splitlines()
    path = folder / "trace.csv"

    def read() -> bool:
        with RouteReader(path) as reader:
            return sum(len(look_up.experts) for look_up in reader.look_ups()) > 0

    def special(chance: random.Random) -> bytes:
        made = list(lines)
        for _ in range(chance.choice((1, 1, 2, 5))):
            place = chance.randrange(len(made))
            cells = made[place].split(",") if "," in made[place] else made[place].split(" ")
            cells[chance.randrange(len(cells))] = str(
                chance.choice(
                    (-1, "", "layer=0", "layer=x", "expert_bytes=9", 2**62, 10**25, "\uff11", "x" * 5000, 0.5, 7)
                )
            )
            made[place] = ("," if "," in made[place] else " ").join(cells)
        return "\n".join(made).encode()

    return Target("route traces", in_file(path, read), (ModelFileError,), [text.encode()], 4 * MIB, special=special)

"""The weights of a draft model, which leave memory while nothing is guessed, and are read again before something is."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

from edge_run.base.errors import TierReadError, system_errors
from edge_run.base.files.identity import FileIdentity, changed
from edge_run.base.interrupt import go_on
from edge_run.base.units import MIB, round_down, round_up
from edge_run.runtime.decoding.repacked_weights import RepackedWeights
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama.model import LlamaModel
from edge_run.tiers import _libc
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import Shard, TensorInfo

READ_BYTES = 4 * MIB  # between which a stop is heard


class DraftWeights:
    """Weights that llama.cpp has read into memory of its own. Not thread-safe, and no pass runs meanwhile.

    size_bytes: what they take.
    on_leave: is told that they have left, and that their room may be had; None: nobody has a use for it, and they stay.
    """

    def __init__(
        self,
        model: LlamaModel,
        gguf: GgufModel,
        repacked: RepackedWeights | None = None,
        check: Callable[[], None] = go_on,
    ) -> None:
        """repacked: those that have been repacked where they lie. check: is called while they are read; stops it."""
        self._gguf, self._repacked, self._check, self._are_here = gguf, repacked, check, True
        self.on_leave: Callable[[], None] | None = None
        tensors = {tensor.name: tensor for tensor in gguf.tensors}
        places: dict[int, TensorInfo] = {}
        for address in ggml.model_tensors(model.handle):
            tensor, loaded = tensors.get(ggml.tensor_name(address).decode("utf-8", "replace")), ggml.tensor_at(address)
            if tensor and loaded.data and loaded.ne[3] * loaded.nb[3] == tensor.size_bytes:
                places[loaded.data] = tensor
        self._places = sorted(places.items(), key=lambda item: (item[1].shard, item[1].offset))
        self.size_bytes = sum(tensor.size_bytes for tensor in places.values())

    @property
    def have_left(self) -> bool:
        """Whether they have to be read before anything is computed with them."""
        return not self._are_here

    def leave(self) -> None:
        """Free their memory, if there is a use for it. Idempotent."""
        if self._are_here and self.on_leave:
            self._free(self.on_leave)

    def come_back(self) -> None:
        """Read them again, if they left, into room that was made for them.

        Raises ModelFileError or TierReadError, or what `check` raises; then they have left once more.
        """
        if self._are_here or not self.on_leave:
            return
        try:
            for number, shard in enumerate(self._gguf.shards):
                self._read(shard, [(address, tensor) for address, tensor in self._places if tensor.shard == number])
            if self._repacked:
                self._repacked.repack_now()
        except BaseException:
            self._free(self.on_leave)
            raise
        self._are_here = True

    def _free(self, on_leave: Callable[[], None]) -> None:
        self._are_here = False
        for address, tensor in self._places:
            start, end = round_up(address, _libc.PAGE), round_down(address + tensor.size_bytes, _libc.PAGE)
            if start < end:
                _libc.drop_pages(start, end - start)
        on_leave()

    def _read(self, shard: Shard, places: list[tuple[int, TensorInfo]]) -> None:
        with system_errors("draft model"), shard.path.open("rb", buffering=0) as file:
            if shard.identity not in (None, FileIdentity.of(os.fstat(file.fileno()))):
                raise changed(shard.path)
            for address, tensor in places:
                fill(file, _libc.view(address, tensor.size_bytes), tensor.offset, self._check)
            _libc.forget_pages(file.fileno())


def fill(file: BinaryIO, memory: memoryview, offset: int, check: Callable[[], None]) -> None:
    """Read `memory` from `offset` on, in pieces before each of which `check` is called. Raises TierReadError."""
    done = 0
    while done < len(memory):
        check()
        file.seek(offset + done)
        n_read = file.readinto(memory[done : done + READ_BYTES])  # type: ignore[attr-defined]
        if not n_read:
            raise TierReadError(f"draft model {file.name}: ends before its weights do; was it cut off?")
        done += n_read

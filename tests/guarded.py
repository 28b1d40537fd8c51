"""llama.cpp's batch in arrays of ours, with a canary after each: what is written beyond its room is found."""

from __future__ import annotations

import ctypes
from typing import Any

from edge_run.runtime.decoding.decoder import LocalDecoder

CANARY, GUARD = 0x5AFE5AFE, 64  # words after each array


class GuardedBatch:
    """Takes the place of the batch of `decoder` until it is closed."""

    def __init__(self, decoder: LocalDecoder) -> None:
        limits = decoder.limits
        self._decoder, self._batch = decoder, decoder._batch.handle
        self._arrays: list[Any] = []
        self._before = {name: self._address(name) for name in ("token", "pos", "n_seq_id", "seq_id", "logits")}
        width = limits.micro_batch_tokens
        for name in ("token", "pos", "n_seq_id"):
            self._put(name, self._array(width))
        self._put("logits", self._array(-(-width // 4)))
        rows = [ctypes.addressof(self._array(limits.sequences)) for _ in range(width)]
        self._rows = (ctypes.c_void_p * width)(*rows)
        self._put("seq_id", self._rows)
        decoder._batch.find_arrays()

    def check(self) -> None:
        """Assert that nothing was written where nothing may be."""
        for array in self._arrays:
            assert set(array[-GUARD:]) == {CANARY}, "written beyond llama.cpp's batch"

    def close(self) -> None:
        for name, address in self._before.items():
            self._set(name, address)
        self._decoder._batch.find_arrays()

    def _array(self, words: int) -> Any:
        array = (ctypes.c_uint32 * (words + GUARD))(*[0] * words, *[CANARY] * GUARD)
        self._arrays.append(array)
        return array

    def _put(self, name: str, array: Any) -> None:
        self._set(name, ctypes.addressof(array))

    def _address(self, name: str) -> int:
        return ctypes.cast(getattr(self._batch, name), ctypes.c_void_p).value or 0

    def _set(self, name: str, address: int) -> None:
        kind = type(getattr(self._batch, name))
        setattr(self._batch, name, ctypes.cast(ctypes.c_void_p(address), kind))

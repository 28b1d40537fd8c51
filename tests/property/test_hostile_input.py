"""Everything that reads what somebody else may have written: a few hostile inputs each, the same ones every time.

The targets are those of `benchmarks/fuzz_parsers.py`, which tries 100,000 inputs each, in little memory.
"""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import zstandard

from hostile import dump
from parser_targets import MAKERS, Target, outcome

INPUTS = 150
DEEP = b'{"a":' * 20_000
HUGE = b"1" + b"0" * 400


@contextmanager
def opened(name: str, folder: Path) -> Iterator[Target]:
    with ExitStack() as stack:
        yield MAKERS[name](folder, stack)


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_hostile_input_is_taken_or_refused(name: str, tmp_path: Path) -> None:
    with opened(name, tmp_path) as target:
        target.check_seeds()
        for number in range(INPUTS):
            data = target.make(random.Random(f"{name}-{number}"))
            what, error = outcome(target, data)
            assert what != "defect", (error, data[:200])


def bundle(**changed: object) -> Callable[[Target], bytes]:
    return lambda target: dump({**target.documents[0], **changed})


def symbols_beyond(target: Target) -> bytes:
    document = json.loads(target.seeds[0])
    document["rates"][0]["rate"]["tables"][0]["below"] = 2**40
    return dump(document)


def hello(text: bytes) -> Callable[[Target], bytes]:
    return lambda _: struct.pack("<I", len(text)) + text


def activations_of_infinite_scale(_: Target) -> bytes:
    content = np.full(1, np.inf, "<f2").tobytes() + bytes(64)
    return b"\1ERS1" + struct.pack("<III", 1, 64, 0) + zstandard.ZstdCompressor().compress(content)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("cluster files", lambda _: DEEP),
        ("join lines", lambda target: target.wrap(DEEP)),
        ("profiles", lambda target: re.sub(rb'("format_version": )\d+', rb"\g<1>" + HUGE, target.seeds[0])),
        ("bundles", lambda _: b'"a\\nb"'),
        ("bundles", bundle(latent=[6, 0, 5])),
        ("bundles", bundle(latent=[6, 65535, 65535])),
        ("bundles", bundle(input=[3, 0, 16])),
        ("bundles", symbols_beyond),
        ("split answers", hello(b'{"edge-run split":1,"tails":[{"fingerprint":"","code_s":1,"image_s":%s}]}' % HUGE)),
        ("split answers", hello(b'{"edge-run split":"a\\nb","tails":[]}')),
        ("coded activations", activations_of_infinite_scale),
    ],
)
def test_what_once_went_wrong_is_refused(name: str, make: Callable[[Target], bytes], tmp_path: Path) -> None:
    with opened(name, tmp_path) as target:
        target.check_seeds()
        data = make(target)
        assert data not in target.seeds
        what, error = outcome(target, data)
        assert what == "refused", error

"""What is done while calls fail: every kind of run, small enough to be done a thousand times, and its right result."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

from edge_run.base.config import ModelConfig
from edge_run.base.errors import BudgetError, system_errors
from edge_run.base.units import GIB, KIB, MIB
from edge_run.runtime.decoding.session import Session
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.generation.speculation_setup import open_session
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.streaming.spilled_cells import SpilledCells
from edge_run.runtime.tools.inflate import inflate
from edge_run.runtime.tools.pack import pack
from edge_run.runtime.tools.tracing import trace
from edge_run.tiers import _libc
from edge_run.tiers.partial import PartialModel, PartialSource
from edge_run.tiers.pieces import Pieces
from edge_run.tiers.readers import Readers
from edge_run.tiers.source import SourceFile
from edge_run.tiers.upload import Extent, Upload
from exactness import fewest_frames
from kit_models import KIT
from slices import Together, batches_of, owners_of, run_slices
from small_engines import greedy
from tiny_models import N_VOCAB, make_model

Work = Callable[[], object]
Scenario = Callable[[Path], contextlib.AbstractContextManager[Work]]
PROMPT = [7, 3, 250, 7, 3]
OPTIONS: dict[str, Any] = {"context_tokens": 256, "micro_batch_tokens": 4, "threads": 1, "readers": 2, "memory": GIB}
OPTIONS["backend"] = "edge-run"
CHUNK_BYTES, LONG = 64 * KIB, 1 << 17


@cache
def _model(name: str, folder: Path, quantisation: str | None = None) -> Path:
    """Make a model, the first time: what is done later is to be all that calls are counted of."""
    return make_model(name, folder, quantisation=quantisation)


@cache
def _packed(model: Path) -> Path:
    return pack(model, model.with_name("packed"), is_overwritten=True).path


@cache
def _copy(model: Path) -> Path:
    return Path(shutil.copy(model, model.with_name("copy.gguf")))


@cache
def _file(folder: Path) -> tuple[Path, bytes]:
    path, data = folder / "uploaded", bytes(range(256)) * 4096 * 20
    path.write_bytes(data)
    return path, data


def _remove(folder: Path, what: str = "") -> None:
    """Remove `folder`, or `what` is in it, through a program: its calls are not counted."""
    os.system(f"rm -rf {shlex.quote(str(folder))}{what}")


@cache
def _page() -> int:
    return _libc.map_anonymous(_libc.PAGE)


@cache
def _folder(parent: Path) -> Path:
    return Path(tempfile.mkdtemp(dir=parent))


def _greedy(session: Session, n_tokens: int = 2) -> list[int]:
    """The tokens that go on from the prompt, computed from its start."""
    session.feed([1])
    return greedy(session, PROMPT, n_tokens)


@contextmanager
def _run(path: Path, share: float, *, is_streamed: bool = True, **options: Any) -> Iterator[Work]:
    """An engine; is_streamed: of what would fit, too."""
    small = {"cache_folder": path.parent / "cache", "chunk_bytes": CHUNK_BYTES}
    config = ModelConfig(**{**OPTIONS, **small, **options})
    with fewest_frames(share):
        engine = Engine.open(path, config, may_be_whole=not is_streamed)
    try:
        assert (engine.plan.mode == "streamed") == is_streamed
        yield partial(_greedy, open_session(engine))
    finally:
        engine.close()


def resident(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A model that is read whole."""
    return _run(_model("llama", folder), 1, is_streamed=False)


def plain(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A model that llama.cpp loads by itself."""
    return _run(_model("llama", folder), 1, is_streamed=False, backend="llama.cpp")


def dense(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A model that streams in order."""
    return _run(_model("llama", folder), 0)


def copied(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A model that streams from two files."""
    return _run(_model("llama", folder), 0, also=_copy(_model("llama", folder)))


def moe(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A mixture of experts that streams by expert."""
    return _run(_model("qwen3moe", folder), 0.25, packed="off")


def packed(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A mixture of experts whose experts are read from a packed file."""
    model = _model("qwen3moe", folder)
    return _run(model, 0.25, packed=_packed(model))


def draft(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A model that streams, and a draft model."""
    drafter = _model("llama", folder, "Q4_0")
    return _run(_model("llama", folder), 0, draft=drafter, draft_tokens=3, speculate="draft")


@contextmanager
def spill(folder: Path) -> Iterator[Work]:
    """A model that streams, whose keys and values are in a file as soon as they can be."""
    path = _model("llama", folder)
    small = {
        "context_tokens": LONG,
        "micro_batch_tokens": 32,
        "memory": _spilling_budget(path),
        "kv_spill": folder / "spill",
    }
    config = ModelConfig(**{**OPTIONS, **small}, cache_folder=folder / "cache", chunk_bytes=4 * _libc.PAGE)
    engine = Engine.open(path, config)
    try:
        cells = next(one for one in engine._loaded.driver.features if isinstance(one, SpilledCells))
        cells.spill.room_bytes = 0
        yield partial(_rewound, open_session(engine))
    finally:
        engine.close()


@cache
def _spilling_budget(path: Path) -> int:
    """A budget with room for a part of a long context."""
    try:
        Engine.open(path, ModelConfig(**{**OPTIONS, "context_tokens": LONG, "micro_batch_tokens": 32, "memory": MIB}))
    except BudgetError as error:
        return error.minimum_bytes + 200 * MIB  # processes grow over hundreds of failures
    raise AssertionError("a model in 1 MiB")


def _rewound(session: Session) -> list[int]:
    """The tokens that go on from a text of some pieces, from a part of it, and from more again."""
    tokens = []
    for text in (30 * PROMPT, 22 * PROMPT, [*22 * PROMPT, *9 * PROMPT]):
        logits, _ = session.feed(text)
        tokens += [int(logits.argmax()), int(session.step(7).argmax())]
    session.feed([1])
    return tokens


@contextmanager
def first(folder: Path) -> Iterator[Work]:
    """A model that nobody has opened before: it is inspected in a child process."""
    _remove(folder / "fresh")
    with _run(_model("llama", folder), 0, cache_folder=folder / "fresh") as work:
        yield work


@contextmanager
def slices(folder: Path) -> Iterator[Work]:
    """A model on two engines that each have some of its layers."""
    path = _model("llama", folder)
    with contextlib.ExitStack() as stack:
        engines = {}
        for node in "ab":
            with fewest_frames(0):
                config = ModelConfig(**OPTIONS, cache_folder=folder / "cache", chunk_bytes=CHUNK_BYTES)
                engines[node] = SliceEngine.open(path, config)
            stack.callback(engines[node].close)
        together = Together(engines, owners_of(len(engines["a"].layout.units), (1, 1)))

        def work() -> object:
            for engine in engines.values():
                engine.decoder.clear()
            return [int(rows[-1].argmax()) for rows in run_slices(together, batches_of([*PROMPT, 5, 6], 4, 4))]

        yield work


@contextmanager
def upload(folder: Path) -> Iterator[Work]:
    """Weights on their way to another device."""
    path, wanted = _file(folder)
    sources = [SourceFile(path)]
    with system_errors("uploading"):
        readers = Readers(2)
    got: dict[int, bytes] = {}

    def put(piece: Extent, address: int) -> None:
        got[piece.offset] = bytes(_libc.view(address, piece.length))

    job: list[Upload] = []
    try:

        def work() -> object:
            if not job:
                with system_errors("uploading"):
                    job.append(Upload([Extent(1, 0, 100, len(wanted) - 200)], sources, readers, put))
            job[0].finish()
            return b"".join(data for _, data in sorted(got.items())) == wanted[100:-100]

        yield work
    finally:
        readers.close()
        for one in job:
            one.close()
        sources[0].close()


@contextmanager
def fetched(folder: Path) -> Iterator[Work]:
    """Pieces that come from elsewhere, are kept, and read."""
    pieces = Pieces((5_000_000,))
    _, data = _file(folder)
    target, address = folder / "fetched", _page()
    _remove(target)

    def work() -> object:
        kept = PartialModel(target, "a" * 64, pieces)
        try:
            for piece in kept.missing(range(pieces.count)):
                place = pieces.place(piece)
                kept.write(piece, data[place.offset : place.offset + place.length])
                kept.sync()
            source = PartialSource(kept, 0)
            try:
                source.read_into(address, _libc.PAGE, 4096)
            finally:
                source.close()
            return bytes(_libc.view(address, _libc.PAGE)) == data[4096 : 4096 + _libc.PAGE]
        finally:
            kept.close()

    yield work


@contextmanager
def _written(make: Callable[[Path], object]) -> Iterator[Work]:
    """Something that is written to a folder, whole or not at all."""
    folder, made = _folder(Path.home()), list[str]()
    _remove(folder, "/*")

    def work() -> object:
        target = folder / f"made-{len(made)}"
        make(target)
        made.append(target.name)
        return True

    yield work
    assert sorted(os.listdir(folder)) == made, "something half-made is left behind"


def packing(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A packed file in the making."""
    model = _model("qwen3moe", folder)
    return _written(lambda target: pack(model, target))


def inflating(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A larger model in the making."""
    return _written(lambda target: inflate(KIT, target, 20_000_000))


def tracing(folder: Path) -> contextlib.AbstractContextManager[Work]:
    """A trace in the making."""
    model = _model("qwen3moe", folder)
    options = {"context_tokens": 256, "threads": 1, "cache_folder": folder / "cache"}
    return _written(lambda target: trace(model, "and so on", target, max_tokens=2, **options))


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        resident,
        plain,
        dense,
        copied,
        moe,
        packed,
        draft,
        spill,
        slices,
        upload,
        fetched,
        first,
        packing,
        inflating,
        tracing,
    )
}
assert max(PROMPT) < N_VOCAB

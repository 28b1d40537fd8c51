"""The models that a worker may run: files in its own folders and, where that is allowed, models that it fetches."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import EdgeRunError, MeshError, ModelFileError, NotTrusted, ProtocolError
from edge_run.base.fields import Fields, JsonValue, plain, shown
from edge_run.base.units import format_size
from edge_run.runtime.fetch.exchange import PieceExchange
from edge_run.runtime.fetch.store import FetchedModel, FetchedModels
from edge_run.runtime.fetch.transfer import DigestSink, PieceSink
from edge_run.runtime.slices.pieces import head_pieces
from edge_run.runtime.worker.search import FileSearch
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_format import MAX_ALIGNMENT_BYTES, MAX_HEADER_BYTES

logger = logging.getLogger(__name__)

HEAD_TIMEOUT_S = 50.0  # of the digests, and of the headers: both together less than an order may take
LOOK_S = 0.5
DIGITS = 64  # of a model's hash
MOST_ANNOUNCED, MOST_NAME = 256, 100  # models, and letters of a name; all are found when they are asked for
MOST_SHARDS, MOST_BYTES = 4096, 1 << 39  # of which the digests take 64 MiB


@dataclass(frozen=True, slots=True)
class ModelAsked:
    """A model as a coordinator asks for it.

    model: its hash.
    sizes: the bytes of each shard.
    head_bytes: the bytes of each shard's header.
    """

    model: str
    name: str
    sizes: tuple[int, ...]
    head_bytes: tuple[int, ...]


def read_asked(order: Fields) -> ModelAsked:
    """Return which model `order` is about. Raises ProtocolError where that cannot be."""
    model, shards = order.name("model", DIGITS), order.items("shards", 1, MOST_SHARDS)
    if len(model) != DIGITS or not set(model) <= set("0123456789abcdef"):
        raise ProtocolError(f"{order.what} names a model {shown(model)}: no hash; other versions?", node=order.node)
    numbers = [Fields({"shard": shard}, order.what, order.node).integers("shard", 2, MOST_BYTES) for shard in shards]
    sizes, heads = tuple(size for size, _ in numbers), tuple(head for _, head in numbers)
    if not all(0 < head <= size for size, head in numbers) or sum(sizes) > MOST_BYTES:
        raise ProtocolError(
            f"{order.what} has shards of {shown(numbers)} bytes and headers: cannot be, at most {MOST_BYTES} are taken",
            node=order.node,
        )
    most_head_bytes = 2 * MAX_HEADER_BYTES + len(heads) * MAX_ALIGNMENT_BYTES  # nearly all are those of the first
    if sum(heads) > most_head_bytes:
        found, most = format_size(sum(heads)), format_size(most_head_bytes)
        raise ProtocolError(f"{order.what} has headers of {found}: at most {most} make sense", node=order.node)
    return ModelAsked(model, order.words("name"), sizes, heads)


class WorkerModels:
    """Finds the models that this worker may run. Not thread-safe."""

    def __init__(
        self, folders: Sequence[Path], config: ModelConfig, exchange: PieceExchange, fetch_bytes: int = 0
    ) -> None:
        """folders: of files that it may run, or files. fetch_bytes: of its disk, for models that it lacks; 0: none."""
        self._folders, self._config, self._exchange = tuple(folders), config, exchange
        self.fetch_bytes = fetch_bytes
        self._fetched = FetchedModels(config.cache / "fetched", fetch_bytes)
        self._search: FileSearch | None = None
        self._sought: ModelAsked | None = None

    @property
    def capabilities(self) -> dict[str, JsonValue]:
        """What there is, for others to know."""
        models: dict[str, JsonValue] = {}
        for path in self._files()[:MOST_ANNOUNCED]:
            with contextlib.suppress(EdgeRunError, OSError):
                models[plain(path.name, MOST_NAME)] = path.stat().st_size
        return {"models": models, "fetch_bytes": self.fetch_bytes}

    def look_for(self, asked: ModelAsked, timeout_s: float) -> FileSearch | None:
        """Look for a model among the files here, from where that was left. Return the search where it is not over yet.

        It goes on then; `find` takes what it finds.
        """
        if self._search is None or self._sought != asked or self._search.is_stale:
            self.stop_search()
            self._sought = asked  # all of it: what was sought with wrong sizes was not found
            self._search = FileSearch(self._files(), asked.model, asked.name, asked.sizes, self._config.cache)
        return None if self._search.wait(timeout_s) else self._search

    def stop_search(self) -> None:
        """Look for no model any more. Idempotent."""
        search, self._search = self._search, None
        if search is not None:
            search.stop()

    def find(self, coordinator: str, asked: ModelAsked, check: Callable[[], None]) -> tuple[Path, FetchedModel | None]:
        """Return where a model is, and what was fetched of it where it is not here as a whole.

        Raises NotTrusted for one that this device does not have and may not fetch, MeshError where that does not work,
        and what keeps a file of that name from being read where no other one is the model. check: may raise, to stop.
        """
        while search := self.look_for(asked, LOOK_S):
            check()
        search, self._search = self._search, None
        assert search is not None
        if found := search.found:
            self._exchange.offer(found.fingerprint, found.shards)
            return found.path, None
        if search.unread is not None:
            if not self.fetch_bytes:
                raise search.unread
            logger.warning("%s; it is fetched", search.unread)
        if not self.fetch_bytes:
            where = plain(", ".join(str(folder) for folder in self._folders)) or "no folder"
            raise NotTrusted(
                f"model {asked.name!r} with hash {asked.model[:12]}: is not in {where}; copy the same file there, or "
                "join with --models where it is, or with --fetch SIZE, so that it fetches what it computes"
            )
        fetched = self._begin(coordinator, asked, check)
        return fetched.partial.paths[0], fetched

    def make_room(self, fetched: FetchedModel, needed: set[int]) -> list[int]:
        """Return which of the pieces `needed` are to be fetched, for which there is room now. Raises TierReadError."""
        self._fetched.make_room(fetched, needed)
        return sorted(fetched.partial.missing(needed))

    def most_weight_bytes(self, asked: ModelAsked) -> int:
        """Return how much of a model's weights may be fetched; what is fetched of it is somewhat more than is used."""
        return max(0, self.fetch_bytes - self.fetch_bytes // 16 - sum(asked.head_bytes))

    def _files(self) -> list[Path]:
        return [
            f for folder in self._folders for f in ([folder] if folder.is_file() else sorted(folder.glob("*.gguf")))
        ]

    def _begin(self, coordinator: str, asked: ModelAsked, check: Callable[[], None]) -> FetchedModel:
        """Open what is here of a model, having fetched its header from the coordinator."""
        digests = self._fetched.known_digests(asked.model, asked.sizes)
        if digests is None:
            sink = DigestSink(asked.model, asked.sizes)
            self._exchange.fetch_now(sink, range(sink.count), coordinator, HEAD_TIMEOUT_S, check)
            if not sink.is_right:
                raise MeshError(f"the digests of model {asked.name!r}: not those of its hash; its file has changed")
            digests = bytes(sink.content)
        fetched = self._fetched.open(asked.model, asked.sizes, digests)
        try:
            if missing := self.make_room(fetched, head_pieces(fetched.partial.pieces, asked.head_bytes)):
                self._exchange.fetch_now(PieceSink(fetched), missing, coordinator, HEAD_TIMEOUT_S, check)
            _check_head(fetched)
        except BaseException:
            fetched.close()
            raise
        return fetched


def _check_head(fetched: FetchedModel) -> None:
    """Raise ModelFileError unless the headers are here as far as they reach."""
    partial = fetched.partial
    shards = read_gguf(partial.paths[0]).shards
    if [shard.path for shard in shards] != partial.paths:
        raise ModelFileError(f"{partial.paths[0]}: has {len(shards)} shards, {len(partial.paths)} were announced")
    for number, shard in enumerate(shards):
        partial.check(number, 0, shard.data_offset)

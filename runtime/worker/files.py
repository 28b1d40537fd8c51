"""The files of the model that a worker has open: its own files, or pieces that it fetches for its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.error_codes import error_document
from edge_run.base.errors import BudgetError, MeshError
from edge_run.base.fields import MOST_WORDS, Document, JsonValue, plain
from edge_run.base.mesh import Link
from edge_run.base.units import format_size
from edge_run.runtime.fetch.exchange import PieceExchange
from edge_run.runtime.fetch.store import FetchedModel
from edge_run.runtime.fetch.transfer import PieceSink, Transfer
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.pieces import head_pieces
from edge_run.runtime.slices.slice import Share
from edge_run.runtime.worker.models import LOOK_S, ModelAsked, WorkerModels
from edge_run.tiers.partial import PartialModel


class WorkerFiles:
    """The files of one model at a time. For one thread at a time; the exchange of pieces has its own thread."""

    def __init__(self, link: Link, folders: Sequence[Path], config: ModelConfig, fetch_bytes: int) -> None:
        self._exchange = PieceExchange(link)
        self._models = WorkerModels(folders, config, self._exchange, fetch_bytes)
        self._asked: ModelAsked | None = None
        self._fetched: FetchedModel | None = None
        self._transfer: Transfer | None = None

    def start(self) -> None:
        """Begin to give pieces to whoever of the mesh asks for them."""
        self._exchange.start()

    @property
    def capabilities(self) -> Document:
        """What there is, for others to know."""
        return self._models.capabilities

    @property
    def model(self) -> str:
        """What is called the model that is open; empty where none is."""
        return self._asked.name if self._asked else ""

    def look_for(self, asked: ModelAsked) -> Document | None:
        """Look for a model among the files here; return how far that is where it takes longer than a moment."""
        search = self._models.look_for(asked, LOOK_S)
        if search is None:
            return None
        return {"file": plain(search.reads), "read_bytes": search.read_bytes, "size_bytes": search.size_bytes}

    def stop_search(self) -> None:
        """Look for no model any more. Idempotent."""
        self._models.stop_search()

    def open(self, coordinator: str, asked: ModelAsked, check: Callable[[], None]) -> tuple[Path, PartialModel | None]:
        """Return where a model is, and what is there of it where that is not all. Raises as `WorkerModels.find`."""
        self.release()
        path, self._fetched = self._models.find(coordinator, asked, check)
        self._asked = asked
        return path, self._fetched.partial if self._fetched else None

    def lacks(self, engine: SliceEngine) -> Document:
        """Return what a planner wants to know of what would have to be fetched. Raises BudgetError for no room."""
        fetched, asked = self._fetched, self._asked
        if fetched is None or asked is None:
            return {}
        partial = fetched.partial
        missing: list[JsonValue] = [
            partial.pieces.total_bytes(partial.missing(needs)) for needs in engine.maps.unit_needs(partial.pieces)
        ]
        most_bytes = self._models.most_weight_bytes(asked)
        least = min(unit.weight_bytes for unit in engine.layout.units[1:-1] or engine.layout.units)
        if least > most_bytes:
            raise BudgetError(
                f"--fetch {format_size(self._models.fetch_bytes)}: too small for any layer of this model, the least "
                f"of which has {format_size(least)}; allow more",
                found_bytes=most_bytes,
                minimum_bytes=least,
            )
        return {"missing_bytes": missing, "most_weight_bytes": most_bytes}

    def fetch(self, engine: SliceEngine, share: Share, providers: Sequence[str]) -> Document:
        """Begin to fetch what `share` needs and is not here. Raises TierReadError where there is no room for it."""
        fetched = self._fetched
        self.stop()
        if fetched is None:
            return {"wanted_bytes": 0}
        missing = self._models.make_room(fetched, self._needs(engine, share))
        if missing:
            nodes = [node for node in providers if node != share.node]
            self._transfer = self._exchange.fetch(PieceSink(fetched), missing, nodes)
        return {"wanted_bytes": fetched.partial.pieces.total_bytes(missing)}

    def check(self, engine: SliceEngine, share: Share) -> None:
        """Raise MeshError where something that `share` needs is not here."""
        self.stop()
        if self._fetched and (missing := self._fetched.partial.missing(self._needs(engine, share))):
            raise MeshError(f"{len(missing)} pieces of the model are not here; they are to be fetched first")

    @property
    def status(self) -> Document:
        """How far fetching is."""
        transfer = self._transfer
        if transfer is None:
            return {}
        error = transfer.error
        return {
            "wanted_bytes": transfer.wanted_bytes,
            "done_bytes": transfer.done_bytes,
            "is_over": transfer.over.is_set(),
            "why": plain(transfer.why, MOST_WORDS),
            "failures": {node: plain(why, MOST_WORDS) for node, why in transfer.failures.items()},
            "wrong": sorted(transfer.wrong),
            **({"error": {**error_document(error), "error": plain(error.message, MOST_WORDS)}} if error else {}),
        }

    def stop(self) -> None:
        """Fetch no more; what came is kept."""
        self._exchange.stop()
        self._transfer = None

    def release(self) -> None:
        """Close the model's files. Idempotent."""
        self.stop()
        fetched, self._fetched, self._asked = self._fetched, None, None
        if fetched:
            fetched.close()

    def close(self) -> None:
        """Look for nothing, give and fetch no more. Idempotent."""
        self.stop_search()
        self._exchange.close()
        self.release()

    def _needs(self, engine: SliceEngine, share: Share) -> set[int]:
        assert self._fetched is not None
        assert self._asked is not None
        pieces = self._fetched.partial.pieces
        return engine.maps.needs(share, pieces) | head_pieces(pieces, self._asked.head_bytes)

"""What devices tell each other before a run: the model, the numerics key, and the room and speed of each device."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, cast

from edge_run.base.config import KV_SPILL_OFF, MOST_CONTEXT_TOKENS, ModelConfig
from edge_run.base.errors import ConfigError, ProtocolError, option
from edge_run.base.fields import MOST_BYTES, MOST_RATE, Document, Fields, JsonValue
from edge_run.base.mesh import MOST_PART_BYTES
from edge_run.base.options import make_config
from edge_run.base.units import format_size
from edge_run.devices.host.machine import compute_threads
from edge_run.devices.host.profile import disk_of
from edge_run.partition.cost import CostModel
from edge_run.partition.mesh_pipeline import MOST_IN_FLIGHT
from edge_run.partition.mesh_plan import DeviceSpec
from edge_run.partition.plan import LOOKAHEAD_CHUNKS
from edge_run.runtime.decoding.driver import PassShape
from edge_run.runtime.forecasting.forecast import pass_work
from edge_run.runtime.graph.units import Layout
from edge_run.runtime.mesh.transport import MOST_WAITING_BYTES
from edge_run.runtime.planning.memory_plan import with_page_tables
from edge_run.runtime.probing.probe import recall
from edge_run.runtime.slices.engine import SliceEngine
from edge_run.runtime.slices.slice import Share
from edge_run.runtime.slices.slice_terms import least_kept, slice_terms

_WHOLE = ("context_tokens", "threads", "micro_batch_tokens", "sequences", "outputs_per_pass")
# What decides the logits, and the size of what is sent: the coordinator's settings hold on all devices of a run.
SHARED_FIELDS = (*_WHOLE, "kv_type", "flash_attention", "exact", "mesh_activations")
IN_FLIGHT = "in_flight"  # passes of a run at a time: it decides what memory is kept for activations
ANY_NUMERICS = "any_numerics"  # tokens may differ from those of one device: each may compute with threads of its own
OTHER_VERSIONS = "the devices have different versions, or commits, of edge-run"
PASSES_AHEAD = 16  # of a device that is quicker than the one after it
GUESSED_COMPUTE_BYTES_PER_S = 5e9  # where nobody has measured; live rates replace it
GUESSED_DISK_BYTES_PER_S = 500e6


def differing(ours: Document, theirs: object) -> list[str]:
    """Return the names of what differs in two numerics keys."""
    if not isinstance(theirs, Mapping):
        return ["all of it"]
    return [key for key in ours if ours[key] != theirs.get(key)]


def shared_settings(engine: SliceEngine, takes_any_numerics: bool) -> Document:
    """Return what the other devices have to open the model with: settings as they turned out here."""
    values = {name: getattr(engine.config, name) for name in SHARED_FIELDS}
    shape = engine.shape
    return {
        **values,
        "threads": shape.threads,
        "context_tokens": shape.context_tokens,
        "sequences": shape.sequences,
        IN_FLIGHT: engine.most_in_flight,
        ANY_NUMERICS: takes_any_numerics,
    }


def read_settings(order: Fields) -> dict[str, JsonValue]:
    """Return the coordinator's settings, each of which can be. Raises ProtocolError for others than are shared."""
    fields = Fields(order.table("settings"), f"{order.what}, in settings,", order.node)
    if set(fields.document) != {*SHARED_FIELDS, IN_FLIGHT, ANY_NUMERICS}:
        raise ProtocolError(f"the settings of a run: not those that devices share; {OTHER_VERSIONS}")
    wholes = {name: fields.integer(name, 1, MOST_CONTEXT_TOKENS) for name in _WHOLE}
    texts = {name: fields.name(name) for name in ("kv_type", "flash_attention", "mesh_activations")}
    # No pass asks for more, and what was asked for takes memory.
    most_outputs = max(2, wholes["micro_batch_tokens"], wholes["sequences"])
    wholes["outputs_per_pass"] = min(wholes["outputs_per_pass"], most_outputs)
    in_flight = fields.integer(IN_FLIGHT, 1, MOST_IN_FLIGHT)
    flags = {name: fields.flag(name) for name in ("exact", ANY_NUMERICS)}
    return {**wholes, **texts, **flags, IN_FLIGHT: in_flight}


def config_from(settings: Document, own: ModelConfig) -> ModelConfig:
    """Return `own` with the coordinator's settings. Raises ConfigError for those that cannot be.

    Keys and values of several texts stay in memory: where they may be in a file, each has cells of its own. Threads are
    part of the numerics key, so a device has those of the run even where these are more than its cores; where tokens
    may differ, it has no more than it would have by itself.
    """
    values: dict[str, Any] = {field.name: getattr(own, field.name) for field in dataclasses.fields(own)}
    if settings["sequences"] != 1:
        values["kv_spill"] = KV_SPILL_OFF
    shared = {name: value for name, value in settings.items() if name not in (IN_FLIGHT, ANY_NUMERICS)}
    if settings[ANY_NUMERICS]:
        shared["threads"] = min(cast("int", shared["threads"]), compute_threads(own.threads))
    try:
        return make_config(ModelConfig, {**values, **shared})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the settings of a run: {error}") from error


def most_waiting_bytes(engine: SliceEngine) -> int:
    """Return what activations may have that came before they are asked for: those of some of the widest passes."""
    widest = engine.width * max(unit.entry_bytes for unit in engine.layout.units)
    return max(MOST_WAITING_BYTES, PASSES_AHEAD * widest)


def check_width(engine: SliceEngine) -> None:
    """Raise ConfigError where the activation of the widest pass may be more than a part of a message carries.

    All that is handed over counts as one part, which it is in nearly all models.
    """
    token_bytes = max(unit.entry_bytes for unit in engine.layout.units)
    if engine.width * token_bytes > MOST_PART_BYTES:
        raise ConfigError(
            f"mesh: a pass of {engine.width:,} tokens hands over {format_size(engine.width * token_bytes)}, and a "
            f"part of a message has at most {format_size(MOST_PART_BYTES)}; give "
            f"{option('micro_batch_tokens', MOST_PART_BYTES // token_bytes)}"
        )


def layout_hash(layout: Layout) -> str:
    """Return what two devices compare to know that they cut the model in the same places."""
    text = repr((layout.starts, layout.n_nodes, layout.shape, [unit.entry_bytes for unit in layout.units]))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def room_bytes(engine: SliceEngine) -> int:
    """Return what weights, keys and values may take in `engine`'s budget while passes are of one token."""
    besides = engine.holdings.total_bytes - engine.holdings.kv_bytes - engine.lendable_bytes
    return max(0, engine.budget_bytes - with_page_tables(besides) - engine.budget_bytes // 512)


def _rates(engine: SliceEngine) -> tuple[float, float]:
    """Return weights computed and read per second, in bytes: guessed where nothing was measured (`edge-run probe`)."""
    profile = recall(engine.gguf, engine.config)
    if profile is None or not profile.kernels:
        return GUESSED_COMPUTE_BYTES_PER_S, GUESSED_DISK_BYTES_PER_S
    work = pass_work(engine.gguf, engine.maps[PassShape(1, 1)][0], n_stops=0)
    seconds = CostModel(profile, engine.shape.threads).compute_s(work, 1, 0)
    disk = disk_of(profile, engine.gguf.shards[0].path)
    weights = sum(unit.weight_bytes for unit in engine.layout.units)
    return weights / max(seconds, 1e-9), disk.bytes_per_s if disk else GUESSED_DISK_BYTES_PER_S


def room_document(engine: SliceEngine) -> Document:
    """Return what a planner wants to know of this device and this model."""
    compute, disk = _rates(engine)
    everything = slice_terms(engine.loaded, engine.maps, Share(("",) * len(engine.layout.units), ""), engine.holdings)
    least_bytes, least_share = least_kept(everything, sum(unit.kept_bytes for unit in engine.layout.units))
    return {
        "room_bytes": room_bytes(engine),
        "window_bytes": (LOOKAHEAD_CHUNKS + 2) * engine.config.chunk_bytes,  # as a plan gives to what runs ahead
        "pair_bytes": engine.maps.pair_chunks * engine.config.chunk_bytes,
        "range_bytes": engine.config.chunk_bytes,  # half a chunk at each end
        "least_kept_bytes": least_bytes,
        "least_kept_share": least_share,
        "compute_bytes_per_s": compute,
        "disk_bytes_per_s": disk,
        "layout": layout_hash(engine.layout),
        "numerics": dataclasses.asdict(engine.loaded.numerics),
    }


def device_spec(node: str, document: Document) -> DeviceSpec:
    """Return a device as the planner sees it, from what it said of itself. Raises ProtocolError."""
    fields = Fields(document, "its answer", node)
    return DeviceSpec(
        node=node,
        memory_bytes=int(fields.number("room_bytes", 0, MOST_BYTES)),
        compute_bytes_per_s=max(1.0, fields.number("compute_bytes_per_s", 0, MOST_RATE)),
        disk_bytes_per_s=max(1.0, fields.number("disk_bytes_per_s", 0, MOST_RATE)),
        window_bytes=int(fields.number("window_bytes", 0, MOST_BYTES)),
        pair_bytes=int(fields.number("pair_bytes", 0, MOST_BYTES)),
        range_bytes=int(fields.number("range_bytes", 0, MOST_BYTES)),
        least_kept_bytes=int(fields.number("least_kept_bytes", 0, MOST_BYTES)),
        least_kept_share=fields.number("least_kept_share", 0, 1),
    )

"""Opens the prompt cache of an engine, where the model and the device can have one."""

from __future__ import annotations

from collections.abc import Callable

from edge_run.base.errors import ModelFileError, NotSupported, TierReadError, from_system, option, reason_of
from edge_run.runtime.engine.engine import Engine
from edge_run.runtime.graph.flow import Flow, users
from edge_run.runtime.keeping.identity import kept_identity
from edge_run.runtime.keeping.keeper import PromptKeeper
from edge_run.runtime.keeping.restoring import RowRestorer
from edge_run.runtime.keeping.store import PromptStore
from edge_run.tiers.kv.layout import KvLayout


def open_keeper(engine: Engine, say: Callable[[str], None]) -> PromptKeeper | None:
    """Return the prompt cache that the configuration of `engine` asks for; None where it asks for none.

    engine: just opened, nothing decoded yet. say: is told in one line why there is none after all, and later what
    could not be kept or read.
    """
    if not engine.config.keeps_prompts:
        return None
    try:
        return _open(engine, say)
    except NotSupported as error:
        say(f"prompt cache: off: {error}")
    except OSError as error:
        say(f"prompt cache: off: {from_system(error, 'opening it')}")
    return None


def _open(engine: Engine, say: Callable[[str], None]) -> PromptKeeper:
    _check_supported(engine)
    layout = layout_of(engine.flow(), engine.context_tokens, engine.shape.n_streams)
    try:
        identity = kept_identity(engine.gguf, engine.numerics, layout.signature)
        engine.gguf.check_unchanged()  # after that: else rows of the open file would be those of what took its place
    except OSError as error:
        raise TierReadError(f"{engine.gguf.shards[0].path}: cannot be read ({reason_of(error)})") from error
    except ModelFileError as error:
        raise NotSupported(str(error)) from error
    config = engine.config
    store = PromptStore(config.prompt_folder, identity, config.most_prompt_bytes, config.most_daily_prompt_bytes)
    store.clean(say)
    width = engine.shape.micro_batch_tokens
    restorer = RowRestorer(engine.decoder, layout, identity.key, width, engine.interrupt.check)
    restorer.check()
    has_passes = not engine.shape.is_exact or layout.needs_snapshots
    keeper = PromptKeeper(
        store,
        identity.key,
        layout,
        restorer,
        width=width,
        has_passes=has_passes,
        say=say,
        check=engine.interrupt.check,
    )
    engine.decoder.watcher = keeper
    return keeper


def _check_supported(engine: Engine) -> None:
    """Raise NotSupported where rows cannot be had, or not be put back as they were."""
    if engine.mesh_use is not None:
        raise NotSupported("over a mesh each device has the rows of its own layers")
    if why := engine.prepared.why_nothing_kept:
        raise NotSupported(why)
    if engine.kv_spill:
        kept = option("kv_spill", "off")
        raise NotSupported(f"keys and values that have no room in memory are spilled; {kept} keeps prompts")


def layout_of(flow: Flow, context_tokens: int, n_streams: int) -> KvLayout:
    """Return what a context of `context_tokens` tokens keeps, from the data flow of one of its passes.

    Keys and values with a cell for each position are rows, others the ring of a sliding window; both are those of the
    first of `n_streams` streams. Whatever else a pass writes that outlives it, as recurrent state, is kept as a whole.
    Raises NotSupported where it keeps nothing that we can see.
    """
    rows = tuple(tensor.part(0, n_streams) for tensor in flow.cells if tensor.n_cells >= context_tokens)
    rings = tuple(tensor.part(0, n_streams) for tensor in flow.cells if tensor.n_cells < context_tokens)
    known = {tensor.address for tensor in (*rows, *rings)}
    leaves = (flow.storages[number] for number in sorted(users(flow)))
    others = tuple((leaf.address, leaf.size_bytes) for leaf in leaves if leaf.address and leaf.address not in known)
    if not (rows or rings or others):
        raise NotSupported("this model's passes leave nothing in memory that the processor reads")
    return KvLayout(rows, others, rings)

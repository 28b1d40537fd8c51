"""Finds out what must be known of a model before it is opened, for runs, plans, measurements and workers alike.

A file that would make llama.cpp end the process is refused first, then a budget that is too small. A plan does without
llama.cpp, which takes long to load, unless a GPU is asked for.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, field, replace
from functools import partial

from edge_run.base.config import KV_AUTO, WIDEST_MICRO_BATCH, ModelConfig
from edge_run.base.errors import BudgetError, NotSupported, option
from edge_run.base.profile import DeviceProfile
from edge_run.base.units import round_down
from edge_run.devices.host.ledger import Ledger
from edge_run.devices.host.memory import charges_reserved, default_budget_bytes
from edge_run.partition.parallel import LEAST_GAIN
from edge_run.runtime.forecasting.abreast import USUAL_PARALLEL, Abreast
from edge_run.runtime.forecasting.forecast import window_of_many
from edge_run.runtime.graph.repackable import kind_of, tensors_of
from edge_run.runtime.inspection.cache import inspect
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.inspection.embedding_shape import embedding_config
from edge_run.runtime.inspection.inspection import Inspection
from edge_run.runtime.inspection.kv_rules import check_kv_types
from edge_run.runtime.inspection.launcher import NoInspector
from edge_run.runtime.inspection.learned_positions import check_positions
from edge_run.runtime.inspection.model_kind import check_kind
from edge_run.runtime.llama.backend_choice import check_backend, is_library_known, why_not_ours
from edge_run.runtime.llama.context_shape import wants_streams
from edge_run.runtime.llama.library import library_build
from edge_run.runtime.planning.experts import Cuts
from edge_run.runtime.planning.kv_type_choice import choose_kv_type
from edge_run.runtime.planning.micro_batch import choose_micro_batch
from edge_run.runtime.planning.packed_choice import choose_packed, choose_repacked_file
from edge_run.runtime.planning.planner import Planner, abreast
from edge_run.runtime.planning.prepared import Prepared
from edge_run.runtime.planning.repack_choice import choose_kinds
from edge_run.runtime.planning.speculation_shape import speculation_config
from edge_run.runtime.planning.spill_terms import LEAST_CONTEXT_TOKENS, check_spill
from edge_run.runtime.planning.usual_context import STEP_TOKENS, longest_that_fits, rope_factors, usual_lengths
from edge_run.runtime.probing.attention import known_ratio
from edge_run.tiers._libc import why_unavailable
from edge_run.tiers.gguf import GgufModel

MOST_SHORTENED = 4  # at a time, where not even the buffers fit

logger = logging.getLogger(__name__)


def prepare(
    gguf: GgufModel,
    config: ModelConfig,
    ledger: Ledger | None = None,
    *,
    is_opened: bool = True,
    is_slice: bool = False,
    may_measure: bool = True,
) -> Prepared:
    """Return what is known of `gguf` before it is opened as `config` says; no weights are read.

    ledger: knows the memory that other runs were promised.
    is_opened: False for a plan alone, which needs sizes and a graph. A file that is to be opened is first tried in a
        child process, and its budget must suffice for opening it.
    is_slice: this device computes a part of it, whose size is not known yet. So its passes and its context are as long
        as asked for, and the same on all devices.
    may_measure: whether this device may be measured for what is left open.

    Raises ModelFileError, ConfigError, NotSupported, KernelError or TierReadError; where it is to be opened, also
    BudgetError.
    """
    check_kind(gguf)
    if is_opened:
        check_backend(config)
    check_positions(gguf, config.context_tokens or 0, config.sequences or USUAL_PARALLEL)
    ledger = ledger or Ledger()
    config = embedding_config(config, gguf, lambda: _budget_bytes(config, ledger))
    if is_slice:
        _check_slice(config)
    elif config.kv_type == KV_AUTO:
        typed = partial(prepare, gguf, ledger=ledger, is_opened=is_opened)
        return choose_kv_type(gguf, config, typed, _recalled, may_measure=may_measure)
    check_kv_types(gguf, config)
    if not config.micro_batch_tokens and (is_slice or config.gpu_memory != 0):  # a GPU has buffers of another kind
        config = replace(config, micro_batch_tokens=WIDEST_MICRO_BATCH)
    opening = _Opening(gguf, ledger, is_opened=is_opened, is_slice=is_slice)
    prepared = _shaped(opening, config)
    if is_opened:
        prepared = replace(prepared, cuts=None)
    if is_slice or prepared.offload or prepared.why_plain:
        return prepared
    file = choose_repacked_file(gguf, prepared.config) if prepared.config.repack != "off" else None
    packed = {kind_of(tensor, by_expert=False) for tensor in tensors_of(gguf, file.facts.names)} if file else set[str]()
    whole = choose_kinds(gguf, prepared.config)
    streamed = choose_kinds(gguf, prepared.config, streamed_in=prepared.budget_bytes, packed=packed)
    return replace(prepared, repacked=whole, repacked_streamed=streamed, repacked_file=file)


def _check_slice(config: ModelConfig) -> None:
    """Raise NotSupported for what the devices of a mesh cannot do together."""
    spills_several = config.spills_kv and config.sequences > 1
    for is_asked, name, why in (
        (config.kv_type == KV_AUTO, "kv_type", "kv type auto: devices of a mesh share one type"),
        (config.repack == "on", "repack", "repack on: weights that devices share are not repacked"),
        (config.embeddings, "", "embeddings: devices of a mesh make text"),
        (spills_several, "kv_spill", f"kv spill: on a mesh that of one text only ({option('sequences', 1)})"),
        (config.kv_keep, "kv_keep", "kv keep: devices of a mesh look at the whole context"),
        (config.context_shift, "context_shift", "context shift: devices of a mesh do not shift"),
    ):
        if is_asked:
            this = f"{option(name)} or " if name else ""
            raise NotSupported(f"{why}; leave out {this}{option('mesh')}")


def _shaped(opening: _Opening, config: ModelConfig) -> Prepared:
    """Return the model prepared with as many sequences, and passes as wide, as are best where `config` leaves it open.

    How many answers at once make the most tokens a second is weighed by `_for_as_many_as_pay`; a mesh, a GPU and cells
    that are not lent are not forecast.
    """
    if not config.sequences:
        is_forecast = not (opening.is_slice or config.gpu_memory != 0 or config.exact)
        if is_forecast and not (config.spills_kv or config.embeddings):
            return _for_as_many_as_pay(opening, config)
        config = replace(config, sequences=1 if config.spills_kv else USUAL_PARALLEL)
    if config.micro_batch_tokens:
        return opening.prepare(config)
    return choose_micro_batch(opening.gguf, config, opening.prepare, _recalled)


def _for_as_many_as_pay(opening: _Opening, config: ModelConfig) -> Prepared:
    """Return the model prepared for as many answers at once as make the most tokens a second, as far as that is known.

    What the usual number leaves in memory says how many that might be. More are taken only where their own plan is
    faster too, and where they do with the same context.
    """
    try:
        usual = _shaped(opening, replace(config, sequences=USUAL_PARALLEL))
        hoped = _abreast(usual)
    except BudgetError:  # which may suffice for fewer
        return _for_fewer(opening, config)
    number = hoped.best if hoped else USUAL_PARALLEL
    with contextlib.suppress(BudgetError):  # which suffices for the usual number
        if number < USUAL_PARALLEL:
            return _shaped(opening, replace(config, sequences=number))
    context_tokens = usual.wanted_context_tokens or usual.config.context_tokens
    while number > USUAL_PARALLEL:
        with contextlib.suppress(BudgetError):
            found = _shaped(opening, replace(config, sequences=number, context_tokens=context_tokens))
            if _is_faster(found, usual):
                return found
        number //= 2
    return usual


def _for_fewer(opening: _Opening, config: ModelConfig) -> Prepared:
    """Return the model prepared for fewer answers than usual: as many as have room and pay. Raises BudgetError."""
    one = _shaped(opening, replace(config, sequences=1))  # before others, so that a hopeless budget is refused at once
    for number in (8, 4, 2):
        with contextlib.suppress(BudgetError):
            found = _shaped(opening, replace(config, sequences=number))
            hoped = _abreast(found)
            has_room = found.known and found.known.context_tokens >= number * config.request_tokens
            if has_room and (hoped is None or hoped.best >= number):
                return found
    return one


def _is_faster(more: Prepared, usual: Prepared) -> bool:
    """Return whether more answers at once make more tokens a second under their own plan.

    It must have room for the texts of all, and for each text that has room beside the usual number, and a window to
    read ahead through, with a margin: how much of the budget a run has is known once it is open.
    """
    number, plans = more.config.sequences, [Planner(prepared).plan() for prepared in (more, usual)]
    least_tokens = max(plans[1].context_tokens, number * more.config.request_tokens)
    least_bytes = min(plans[1].window_bytes, window_of_many(plans[0]))
    if plans[0].window_bytes < least_bytes or plans[0].context_tokens < least_tokens:
        return False
    speeds = [one.tokens_per_s(prepared.config.sequences) for prepared in (more, usual) if (one := _abreast(prepared))]
    return len(speeds) == 2 and speeds[0] >= LEAST_GAIN * speeds[1]


def _abreast(prepared: Prepared) -> Abreast | None:
    """Return what answers at once would make of a model as it is prepared; None where nothing is known of that.

    Where the device was not measured, what is read decides for a mixture: few answers may read more for each token than
    one, as each needs other experts, and many share what is read.
    """
    if prepared.known and not prepared.why_plain:
        profile, planner = _recalled(prepared), Planner(prepared)
        is_timed, plan = profile is not None and planner.can_time(profile), planner.plan()
        if is_timed or plan.expert_bytes:
            return abreast(planner, plan, profile if is_timed else None)
    return None


def _recalled(prepared: Prepared) -> DeviceProfile | None:
    """Return the speed of this device for the model, where it was measured; disturbed where that of attention is."""
    from edge_run.runtime.probing.probe import recall

    profile = recall(prepared.gguf, prepared.config)
    if profile and prepared.attention and prepared.attention.is_disturbed:
        return replace(profile, is_disturbed=True)
    return profile


@dataclass(frozen=True, slots=True)
class _Opening:
    """How a model is prepared, whatever the width of its passes; see `prepare`."""

    gguf: GgufModel
    ledger: Ledger
    is_opened: bool
    is_slice: bool
    cuts: Cuts = field(default_factory=Cuts)

    def prepare(self, asked: ModelConfig) -> Prepared:
        """Return what is known of the model before it is opened with passes of a given width."""
        gguf = self.gguf
        if asked.context_tokens is None:
            asked = replace(asked, context_tokens=self._usual_tokens(asked))
        config = speculation_config(asked, gguf)
        budget_bytes = _budget_bytes(config, self.ledger)
        draft = self._draft(config, is_tried=self.is_opened and config.check_file)
        if draft and self.is_opened and (config.gpu_memory == 0 or not is_library_known()):
            draft.check_budget(budget_bytes)
        why_plain = why_not_ours(config, is_loaded=self.is_opened)
        packed = None if why_plain else choose_packed(gguf, config)
        attention = known_ratio(config)
        prepared = Prepared(gguf, config, budget_bytes, why_plain, draft, packed, attention=attention, cuts=self.cuts)
        if self.is_opened and not is_library_known():  # what it does cannot be said
            return prepared
        prepared = replace(prepared, known=_tried(gguf, config) if self.is_opened else _outlined(gguf, config))
        if config.gpu_memory != 0:
            prepared = _with_offload(prepared)
            if draft and self.is_opened:
                draft.check_budget(budget_bytes, prepared.draft_offload.moved_bytes if prepared.draft_offload else 0)
        if not prepared.known or why_plain:
            return prepared
        if (tokens := self._tokens_that_fit(prepared)) < prepared.known.context_tokens:
            check_spill(config, prepared.known.cells, gguf.shards[0].path)
            shorter = self.prepare(replace(asked, context_tokens=tokens))
            return replace(shorter, wanted_context_tokens=prepared.known.context_tokens)
        if self.is_opened:
            _check_budget(prepared, self.ledger)
        return prepared

    def _usual_tokens(self, asked: ModelConfig) -> int:
        """Return the length of a context that was not asked for: longer than is usual where keys and values are lent.

        They are not on a GPU, by llama.cpp's own loader, and where the kernel charges what is only reserved; a plan for
        a mesh counts them in full. Without the leave to start a child first, nothing is known.
        """
        lengths = usual_lengths(self.gguf)
        is_lent = not (self.is_slice or asked.gpu_memory != 0 or charges_reserved())
        is_known = is_library_known() and asked.check_file and not why_unavailable()
        if len(lengths) == 1 or not is_lent or not is_known or why_not_ours(asked, is_loaded=self.is_opened):
            return lengths[-1]
        try:
            longest, usual = (self._planned(replace(asked, context_tokens=n)) for n in (lengths[0], lengths[-1]))
        except NoInspector:
            return lengths[-1]
        return longest_that_fits(usual, longest, lengths)

    def _planned(self, asked: ModelConfig) -> Prepared:
        """Return what a plan of the model is made from, with a context of the length that `asked` has."""
        config = speculation_config(asked, self.gguf)
        draft = self._draft(config, is_tried=False)
        budget_bytes = _budget_bytes(config, self.ledger)
        packed = choose_packed(self.gguf, config)
        known = _outlined(self.gguf, config)
        return Prepared(self.gguf, config, budget_bytes, draft=draft, packed=packed, known=known, cuts=self.cuts)

    def _draft(self, config: ModelConfig, *, is_tried: bool) -> DraftFile | None:
        return DraftFile.read(config.draft_model, config, self.gguf, is_tried=is_tried) if config.draft_model else None

    def _tokens_that_fit(self, prepared: Prepared) -> int:
        """Return how long a context the budget may have room for; a context is made no longer than that.

        One that decides about a model's factors is as long as asked for: cells take memory only as they are written.
        One whose sequences have cells of their own is too, as these are not lent.
        """
        assert prepared.known is not None
        wanted = prepared.known.context_tokens
        has_factors = bool(rope_factors(self.gguf, wanted))
        is_fixed = self.is_slice or prepared.offload or has_factors or wants_streams(prepared.config)
        if is_fixed or wanted <= LEAST_CONTEXT_TOKENS:
            return wanted
        try:
            found = Planner(prepared).sketch().context_tokens
        except BudgetError:  # the buffers of a shorter context are smaller
            found = wanted // MOST_SHORTENED
        return max(LEAST_CONTEXT_TOKENS, round_down(found, STEP_TOKENS)) if found < wanted else wanted


def _tried(gguf: GgufModel, config: ModelConfig) -> Inspection | None:
    """Return the findings of a child process that opened `gguf`; None where no child is wanted or possible."""
    if not config.check_file or why_unavailable():
        return None
    try:
        return inspect(gguf, config, library_build())
    except NoInspector as error:
        logger.warning("%s; it is opened all the same", error)
        return None


def _outlined(gguf: GgufModel, config: ModelConfig) -> Inspection:
    """Return the sizes and the graph that a plan is made from."""
    if reason := why_unavailable():
        raise NotSupported(
            f"{gguf.shards[0].path}: no plan, as only llama.cpp's own loader, which keeps no budget, runs here: "
            f"{reason}"
        )
    return inspect(gguf, config, library_build(), is_tried=False)


def _with_offload(prepared: Prepared) -> Prepared:
    """Return `prepared` with the parts of the model and of its draft model that go to a GPU."""
    from edge_run.runtime.gpu.offload import plan_offload  # and with it llama.cpp, which takes long to load
    from edge_run.runtime.planning.offload_times import OffloadTimes

    times = OffloadTimes(prepared, _recalled)
    parts = plan_offload(prepared.gguf, prepared.config, prepared.budget_bytes, prepared.draft, times.token_s)
    return replace(prepared, offload=parts.model, draft_offload=parts.draft, profile=times.profile)


def _budget_bytes(config: ModelConfig, ledger: Ledger) -> int:
    return int(config.memory or default_budget_bytes(ledger.promised_bytes))


def _check_budget(prepared: Prepared, ledger: Ledger) -> None:
    """Raise BudgetError where what is free, or the budget, is too small even for opening the model."""
    planner = Planner(prepared)
    if planner.opening_bytes > ledger.free_bytes:
        ledger.check(planner.minimum_bytes, prepared.gguf.shards[0].path.name)
    if planner.opening_bytes > prepared.budget_bytes:
        planner.sketch()  # which may raise

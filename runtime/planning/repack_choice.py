"""Which weights of a model are repacked for llama.cpp's kernels that compute several rows at once.

By default those kinds are repacked that measured faster on this device. A decision is kept, as the numerics key hangs
on it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from edge_run.base.config import PACKED_OFF, WIDEST_MICRO_BATCH, ModelConfig
from edge_run.base.profile import KernelSpeed
from edge_run.partition.kernel_choice import Streaming, is_repacking_worth_it
from edge_run.runtime.graph.repackable import is_by_expert, kind_of
from edge_run.runtime.probing.kept_findings import KeptFindings
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import TensorInfo

Speed = TypeVar("Speed", bound=KernelSpeed)


def choose_kinds(
    gguf: GgufModel, config: ModelConfig, *, streamed_in: int | None = None, packed: Collection[str] = ()
) -> frozenset[str]:
    """Return the kinds of weights of `gguf` that are to be repacked, where they have a kernel for it here.

    With `exact`, those are left out whose kernels give other bits in passes of other widths. A weight without a kernel,
    as one of an odd number of rows, says nothing of the others of its kind.

    streamed_in: the budget that they stream in; None where all have room. Each pass then waits for the drive, and may
        wait until what it brought is repacked.
    packed: the kinds that are read repacked then, which are chosen where nothing was measured too: somebody packed
        them.
    """
    kinds = _wanted_kinds(gguf, config, streamed_in, packed)
    if not (config.exact and kinds):
        return kinds
    from edge_run.runtime.llama import exact_kernels  # and with it llama.cpp, which takes long to load

    tried = {(kind, tensor.type_id, tensor.shape) for kind, tensor in _by_kind(gguf) if kind in kinds}
    return kinds - {
        kind
        for kind, type_id, shape in tried
        if exact_kernels.is_kernel_even(type_id, shape, by_expert=is_by_expert(kind)) is False
    }


def _by_kind(gguf: GgufModel) -> list[tuple[str, TensorInfo]]:
    """Return the matrices of `gguf`, each with its kind."""
    matrices = (tensor for tensor in gguf.tensors if len(tensor.shape) in (2, 3))
    return [(kind_of(tensor, by_expert=len(tensor.shape) == 3), tensor) for tensor in matrices]


def _wanted_kinds(
    gguf: GgufModel, config: ModelConfig, streamed_in: int | None, packed: Collection[str]
) -> frozenset[str]:
    """Return the kinds to be repacked whatever their kernels are like; see `choose_kinds`."""
    from edge_run.runtime.probing.probe import recall_drive, recall_kernels

    matrices = _by_kind(gguf)
    kinds = {kind for kind, _ in matrices}
    n_experts = max((tensor.shape[2] for _, tensor in matrices if len(tensor.shape) == 3), default=1)
    used_share = min(1.0, gguf.used_experts / n_experts)
    if config.repack != "auto":
        return frozenset(kinds) if config.repack == "on" else frozenset()
    plain, repacked = recall_kernels(config)
    findings = KeptFindings.of_setup(config.cache / "repacked")
    kept, parallel, streaming = findings.read(_decisions) or {}, max(1, config.sequences), None
    if not repacked and not kept and not packed:
        return frozenset()
    if streamed_in is not None:
        streaming = Streaming.under(streamed_in, gguf.data_bytes, recall_drive(gguf, config))
    how = f" streamed {streaming.share:.0%}" if streaming else ""
    shares = {kind: used_share if is_by_expert(kind) else 1.0 for kind in kinds}
    widths = {kind: sorted({_of_one(width, share) for width in _widths(config)}) for kind, share in shares.items()}
    names = {kind: f"{kind} {widths[kind]}{how}{' packed' * (kind in packed)}" for kind in kinds}
    decided: dict[str, bool] = {}
    for kind, name in names.items():
        before, ready = _like(kind, plain), _like(kind, repacked)
        if kind in packed:
            ready = [replace(kernel, repacked_bytes_per_s=math.inf) for kernel in ready]
        after: Sequence[KernelSpeed] = ready
        if streaming:
            before, after = ([streaming.speed(kernel) for kernel in some] for some in (before, ready))
        abreast = _of_one(parallel, shares[kind])
        decision = is_repacking_worth_it(before, after, widths[kind], kept.get(name), parallel=abreast)
        if decision is not None:
            decided[name] = decision
    findings.decide(kept, decided)
    return frozenset(kind for kind, name in names.items() if decided.get(name, kind in packed))


def kinds_to_pack(gguf: GgufModel, config: ModelConfig) -> frozenset[str]:
    """Return the kinds of weights that a packed file of `gguf` has, where they have a kernel for it here.

    They are those that measured faster repacked, or all where nothing was measured. config: says where that is kept.
    """
    from edge_run.runtime.probing.probe import recall_kernels

    usual = ModelConfig(micro_batch_tokens=WIDEST_MICRO_BATCH, packed=PACKED_OFF, cache_folder=config.cache_folder)
    _, repacked = recall_kernels(usual)
    return choose_kinds(gguf, replace(usual, repack="auto" if repacked else "on"))


def _widths(config: ModelConfig) -> list[int]:
    """Return the widths of passes that a run needs to be fast: tokens, answers, guesses to verify, and prompts."""
    return sorted({1, max(1, config.sequences), max(1, config.outputs_per_pass), config.micro_batch_tokens or 1})


def _of_one(width: int, share: float) -> int:
    """Return how many of a pass's tokens each weight meets that any of them uses, if each uses this share of all."""
    return max(1, round(width * share / (1 - (1 - share) ** width)))


def _like(kind: str, kernels: Sequence[Speed]) -> list[Speed]:
    """Return the speeds of weights like those of `kind`: of its type, and of the nearest length of rows."""
    type_name, row_elements, *_ = kind.split("/")
    alike = [k for k in kernels if k.type_name == type_name and k.by_expert == is_by_expert(kind)]
    distances = [abs(kernel.row_elements - int(row_elements)) for kernel in alike]
    return [kernel for kernel, distance in zip(alike, distances, strict=True) if distance == min(distances)]


def _decisions(found: Any) -> Mapping[str, bool]:
    return {str(name): decision for name, decision in found.items() if isinstance(decision, bool)}

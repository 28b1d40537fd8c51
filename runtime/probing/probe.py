"""What this device can do: its figures, measured where they are not known yet, in seconds.

Each figure is kept as soon as it is measured (`devices/host/profile.py`), so that an interrupted probe goes on where it
was.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.config import ModelConfig
from edge_run.base.errors import ConfigError, KernelError, NotSupported, option, system_errors
from edge_run.base.profile import DeviceProfile, GpuProfile, KernelSpeed, RepackedSpeed
from edge_run.base.units import format_count
from edge_run.devices.host.disk import NORMAL, Effort, measure_disk
from edge_run.devices.host.machine import OtherLoad, compute_threads, describe_machine
from edge_run.devices.host.mount import Mount, find_mount
from edge_run.devices.host.profile import (
    CostsFigure,
    DiskFigure,
    Figure,
    KernelFigure,
    Measurements,
    PassOverheads,
    ProfileStore,
    RepackedFigure,
)
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.probing.attention import PLAIN, attention_speeds, is_ratio_missing, kind_of_keys
from edge_run.runtime.probing.workload import (
    ATTENTION,
    MANY_TOKENS,
    OTHERS_SHARE,
    Multiplication,
    measured_now,
    this_setup,
)
from edge_run.tiers.gguf import GgufModel, read_gguf
from edge_run.tiers.gguf_format import TENSOR_TYPES

logger = logging.getLogger(__name__)

MODEL_TOKENS = (1, 8, 16, 64, 512)  # llama.cpp has kernels that take 16 tokens at a time, and 8 no less long
EXPERT_TOKENS = (1, 8, 16, 64)  # of each expert; more take as much longer
USUAL_TOKENS = (1, 512)
USUAL_KINDS = tuple((name, 4096, False) for name in ("Q4_0", "Q8_0", "Q4_K", "F16"))
LEAST_SHARE = 0.01  # of a model's bytes: a kind of weights below this is not measured
MOST_ROW_ELEMENTS = 1 << 18  # five times what models have: many rows are measured, whose memory a file would choose
DISTURBED = (
    "other programs were at work or took the memory while this was measured, so that some figures are wrong; those are "
    "kept for ten minutes only"
)

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Target:
    """A file system to measure: through a folder on it, and the model file there, where there is one."""

    folder: Path
    mount: Mount
    model: Path | None


@system_errors("measuring")
def probe(
    folders: Sequence[str | Path] = (),
    model: str | Path | None = None,
    config: ModelConfig | None = None,
    *,
    is_fresh: bool = False,
    on_step: Step = lambda text: None,
    store: ProfileStore | None = None,
    effort: Effort = NORMAL,
    measures_gpus: bool = True,
) -> DeviceProfile:
    """Return what this device can do, from the cache what is there, and measured what is missing.

    folders: on the disks to measure, each file system once; the disk of `model` is measured too, by reading the model.
    model: whose kinds of weights are measured; None measures common ones. config: threads, readers, cache folder, and
    the type of keys and values, on which attention is measured where that is not 16 bits.
    is_fresh: measure again what is in the cache. on_step: is told what is measured next. store: its `problem` says
    afterwards why what was measured is not kept, or not for long, and why a GPU was not measured. measures_gpus: else
    they are left out.

    Raises ConfigError, ModelFileError, NotSupported, TierReadError or KernelError; what was measured before that is
    kept, as it is after KeyboardInterrupt.
    """
    config, model = config or ModelConfig(), None if model is None else Path(model)
    gguf = None if model is None else read_gguf(model)
    targets = _targets(map(Path, folders), gguf, config.also)
    store = store or ProfileStore(config.cache)
    session = _Session(store, on_step)
    if not is_fresh:
        session.recall()
    threads = compute_threads(config.threads)
    disks = [session.disk(target, config.readers, effort) for target in targets]
    session.kernels(_kernels(gguf), threads)
    costs = session.costs(threads)
    is_disturbed, kind = False, kind_of_keys(config)
    if is_ratio_missing(config):
        on_step(f"Attention on keys and values of {kind}")
        is_disturbed = attention_speeds(config, (PLAIN, kind), int(config.memory or 0)).is_disturbed
    kernel_figures = session.known_kernels(threads)
    gpus = session.gpus(_kernels(gguf), config) if measures_gpus else []
    profile = session.profile(costs, kernel_figures, disks, gpus)
    problem = store.problem or (DISTURBED if is_disturbed or profile.is_disturbed else "")
    store.problem = "; ".join(filter(None, (problem, *session.unmeasured)))
    return profile


def recall(gguf: GgufModel, config: ModelConfig) -> DeviceProfile | None:
    """Return what is known of this device, None where something that the model needs was not measured. Quick."""
    session = _Session(ProfileStore(config.cache), lambda text: None)
    session.recall()
    threads = compute_threads(config.threads)
    disks = [session.known_disk(target, config.readers) for target in _targets([], gguf, config.also)]
    costs, kernel_figures = session.known_costs(threads), session.known_kernels(threads)
    wanted = _kernels(gguf)
    is_complete = not any(missing(kind, wanted, threads) for kind in (session.known.kernels, session.known.repacked))
    found = [disk for disk in disks if disk is not None]
    if costs is None or len(found) < len(disks) or not is_complete:
        return None
    gpus = session.known_gpus(_kernels(gguf), config) if config.gpu_memory != 0 else []
    return session.profile(costs, kernel_figures, found, gpus) if gpus is not None else None


def recall_kernels(config: ModelConfig) -> tuple[Sequence[KernelSpeed], Sequence[RepackedSpeed]]:
    """Return how fast this device is known to multiply, with weights as they are in files and repacked. Quick.

    Only what was measured while no other programs were at work, so that the two can be compared.
    """
    known, threads = ProfileStore(config.cache).load(this_setup()), compute_threads(config.threads)

    def counts(figure: KernelFigure) -> bool:
        return figure.speed.threads == threads and not figure.is_disturbed

    plain = [figure.speed for figure in known.kernels if counts(figure)]
    return plain, [figure.speed for figure in known.repacked if figure.is_there and counts(figure)]


def recall_drive(gguf: GgufModel, config: ModelConfig) -> float:
    """Return the seconds that the drives of a model are known to take for a byte; 0 where one is not known. Quick.

    Only what was measured while no other programs were at work, as `recall_kernels` does.
    """
    session = _Session(ProfileStore(config.cache), lambda text: None)
    session.recall()
    found = [session.known_disk(target, config.readers) for target in _targets([], gguf, config.also)]
    known = [figure.disk.bytes_per_s for figure in found if figure and not figure.is_disturbed]
    return 1 / sum(known) if known and len(known) == len(found) else 0.0


class _Session:
    """One probe: what is known of the device so far, and the measuring of what is not.

    unmeasured: of each GPU that could not be measured, why, in a line.
    """

    def __init__(self, store: ProfileStore, on_step: Step) -> None:
        self.machine = describe_machine()
        self.identity = this_setup()
        self.known, self.unmeasured = Measurements(), list[str]()
        self._store, self._on_step = store, on_step

    def recall(self) -> None:
        """Take over what the cache knows."""
        self.known = self._store.load(self.identity)

    def _keep(self, measured: Measurements) -> None:
        self.known = self.known.with_later(measured)
        self._store.save(self.identity, measured)

    def profile(
        self,
        costs: CostsFigure,
        kernel_figures: Sequence[KernelFigure],
        disks: Sequence[DiskFigure],
        gpus: Sequence[GpuProfile],
    ) -> DeviceProfile:
        """Return figures as one profile, as old as the oldest of them."""
        repacked = self.known_repacked(costs.costs.threads)
        figures: list[Figure] = [costs, *kernel_figures, *repacked, *disks, *self._figures_of(gpus)]
        return DeviceProfile(
            measured_at=min(figure.measured_at for figure in figures),
            library=library_version(),
            cpu=self.machine.cpu,
            physical_cores=self.machine.cores.at_once,
            logical_cores=self.machine.cores.logical_at_once,
            memory_bytes=self.machine.memory_bytes,
            memory_limit_bytes=self.machine.memory_limit_bytes,
            node_s=costs.costs.node_s,
            stop_s=costs.costs.stop_s,
            attention_flops_per_s=costs.costs.attention_flops_per_s,
            kernels=tuple(figure.speed for figure in kernel_figures),
            disks=tuple(figure.disk for figure in disks),
            gpus=tuple(gpus),
            repacked_kernels=tuple(figure.speed for figure in repacked),
            is_disturbed=any(figure.is_disturbed for figure in figures),
        )

    def _figures_of(self, gpus: Sequence[GpuProfile]) -> list[Figure]:
        names = {gpu.name for gpu in gpus}
        kernel_figures = [figure for figure in self.known.gpu_kernels if figure.gpu in names]
        return [*kernel_figures, *(figure for figure in self.known.gpu_costs if figure.gpu in names)]

    def known_kernels(self, threads: int) -> list[KernelFigure]:
        """Return the kernels that were measured with so many threads."""
        return [figure for figure in self.known.kernels if figure.speed.threads == threads]

    def known_repacked(self, threads: int) -> list[RepackedFigure]:
        """Return the repacked kernels that were measured with so many threads."""
        return [figure for figure in self.known.repacked if figure.is_there and figure.speed.threads == threads]

    def known_costs(self, threads: int) -> CostsFigure | None:
        """Return what a pass costs besides weights, None where it was not measured."""
        return next((figure for figure in self.known.costs if figure.costs.threads == threads), None)

    def known_disk(self, target: _Target, readers: int) -> DiskFigure | None:
        """Return the figures of a file system, None where it was not measured."""
        for figure in self.known.disks:
            if figure.holds_for(target.mount, readers):
                return dataclasses.replace(figure, disk=dataclasses.replace(figure.disk, folder=str(target.folder)))
        return None

    def disk(self, target: _Target, readers: int, effort: Effort) -> DiskFigure:
        """Return the figures of a file system."""
        if known := self.known_disk(target, readers):
            return known
        self._on_step(f"Reading from the disk of {target.folder}")
        load = OtherLoad()
        disk = measure_disk(target.folder, target.model, readers, effort)
        figure = DiskFigure(measured_now(), load.share > OTHERS_SHARE, target.mount.volume, disk)
        self._keep(Measurements(disks=(figure,)))
        return figure

    def kernels(self, wanted: Sequence[Multiplication], threads: int) -> None:
        """Measure what is not known of `wanted`, with weights as they are in files, and repacked where they can be."""
        from edge_run.runtime.probing import kernels

        known = self.known.kernels, self.known.repacked
        left = [one for one in wanted if any(missing(figures, [one], threads) for figures in known)]
        for number, (type_name, row_elements, tokens, by_expert) in enumerate(left, 1):
            width, place = format_count(tokens, "token"), f"{number} of {len(left)}"
            self._on_step(f"Multiplying {type_name}, rows of {row_elements:,}, {width} ({place})")
            load, lacks_room = OtherLoad(), kernels.lacks_room(tokens)
            one = type_name, row_elements, tokens, threads, by_expert
            is_there = kernels.has_repacked_kernel(type_name, row_elements, by_expert)
            try:
                if is_there:
                    plain, repacked = kernels.measure_repacked(*one)
                else:
                    plain, repacked = kernels.measure_matmul(*one), RepackedSpeed(*one, 1.0, 1.0)
            except NotSupported as error:
                logger.info("%s", error)
                continue
            now, is_disturbed = measured_now(), lacks_room or load.share > OTHERS_SHARE
            figure = KernelFigure(now, is_disturbed, plain)
            beside = RepackedFigure(now, is_there and is_disturbed, repacked, is_there)
            self._keep(Measurements(kernels=(figure,), repacked=(beside,)))

    def gpus(self, wanted: Sequence[Multiplication], config: ModelConfig) -> list[GpuProfile]:
        """Return the GPUs that are there, and how fast the first one computes, which a run would use.

        Of one that the processor plays this is measured only where it is asked for: it takes long. What cannot be
        measured now, perhaps as other programs take the GPU's memory, is left out, and why is noted.
        """
        from edge_run.runtime.gpu.devices import find_gpus, measure_upload
        from edge_run.runtime.probing.gpu_probe import gpu_profile, is_known, measure_gpu

        found, uploads = find_gpus(), dict[str, float]()  # of those whose costs, which say it too, are not known
        for number, gpu in enumerate(found):
            try:
                if number == 0 and (not gpu.is_software or config.gpu_memory != 0):
                    measure_gpu(gpu, wanted, self.known, self._keep, self._on_step)
                if not is_known(gpu, (), self.known):
                    uploads[gpu.name] = measure_upload(gpu)
            except KernelError as error:
                self.unmeasured.append(f"{gpu.name} was not measured: {error}")
                logger.info("%s", self.unmeasured[-1])
        return [gpu_profile(gpu, self.known, uploads.get(gpu.name, 0.0)) for gpu in found]

    def known_gpus(self, wanted: Sequence[Multiplication], config: ModelConfig) -> list[GpuProfile] | None:
        """Return the GPUs that are there, None where one that a run would use was not measured."""
        from edge_run.runtime.gpu.devices import choose_gpu, find_gpus
        from edge_run.runtime.probing.gpu_probe import gpu_profile, is_known

        found = find_gpus()
        wanted_bytes = None if config.gpu_memory is None else int(config.gpu_memory)
        if choose_gpu(wanted_bytes, found) and not is_known(found[0], wanted, self.known):
            return None
        return [gpu_profile(gpu, self.known) for gpu in found]

    def costs(self, threads: int) -> CostsFigure:
        """Return what a pass costs besides weights."""
        if known := self.known_costs(threads):
            return known
        from edge_run.runtime.probing import kernels

        self._on_step("Attention, nodes and stops")
        load, lacks_room = OtherLoad(), kernels.lacks_room(1)
        one, many = (kernels.measure_attention(tokens, ATTENTION, threads=threads) for tokens in (1, MANY_TOKENS))
        costs = PassOverheads(threads, kernels.measure_node_s(threads), kernels.measure_stop_s(threads), (one, many))
        figure = CostsFigure(measured_now(), lacks_room or load.share > OTHERS_SHARE, costs)
        self._keep(Measurements(costs=(figure,)))
        return figure


def missing(known: Iterable[KernelFigure], wanted: Sequence[Multiplication], threads: int) -> list[Multiplication]:
    """Return which of `wanted` were not measured with so many threads, by what is `known`."""
    keys = {figure.key for figure in known}
    return [one for one in wanted if (*one, threads) not in keys]


def _targets(folders: Iterable[Path], gguf: GgufModel | None, also: Path | str | None) -> list[_Target]:
    """Return each file system once; the model's is measured through the largest of its shards.

    also: a copy of the model, or the folder that it is in; its file system is measured through it.
    """
    model = None if gguf is None else max(gguf.shards, key=lambda shard: shard.size_bytes).path
    targets: dict[Mount, _Target] = {}
    if sys.platform != "linux":
        return []
    if model is not None:
        folder, mount = model.absolute().parent, find_mount(model)
        targets[mount] = _Target(folder, mount, model)
    if also is not None and model is not None:
        copy = Path(also, model.name) if Path(also).is_dir() else Path(also)
        if copy.exists():
            mount = find_mount(copy)
            targets.setdefault(mount, _Target(copy.absolute().parent, mount, copy))
    for folder in folders:
        if not folder.is_dir():
            other = option("model")
            raise ConfigError(f"{folder}: is no folder; name a folder on the disk to measure, or a model with {other}")
        mount = find_mount(folder)
        targets.setdefault(mount, _Target(folder.absolute(), mount, None))
    return list(targets.values())


def _kernels(gguf: GgufModel | None) -> list[Multiplication]:
    """Return the multiplications to measure."""
    if gguf is None:
        return [(*kind[:2], tokens, kind[2]) for kind in USUAL_KINDS for tokens in USUAL_TOKENS]
    return [
        (type_name, row_elements, tokens, by_expert)
        for type_name, row_elements, by_expert in weight_kinds(gguf)
        for tokens in (EXPERT_TOKENS if by_expert else MODEL_TOKENS)
    ]


def weight_kinds(gguf: GgufModel) -> tuple[tuple[str, int, bool], ...]:
    """Return (type, row length, by expert) of the weights that a model multiplies with, the most bytes first.

    Those of rows that no model has are left out.
    """
    sizes: dict[tuple[str, int, bool], int] = {}
    has_output = any(tensor.name == "output.weight" for tensor in gguf.tensors)
    for tensor in gguf.tensors:
        is_table = has_output and tensor.name == "token_embd.weight"  # looked up, never multiplied with
        if (
            len(tensor.shape) in (2, 3)
            and tensor.name.endswith(".weight")
            and "norm" not in tensor.name
            and not is_table
            and tensor.shape[0] <= MOST_ROW_ELEMENTS
        ):
            kind = TENSOR_TYPES[tensor.type_id].name, tensor.shape[0], len(tensor.shape) == 3
            sizes[kind] = sizes.get(kind, 0) + tensor.size_bytes
    ordered = sorted(sizes, key=lambda kind: -sizes[kind])
    return tuple(kind for kind in ordered if sizes[kind] >= LEAST_SHARE * gguf.data_bytes)

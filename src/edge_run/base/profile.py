"""What a device can do, measured: the figures that predictions are made of. How they are measured is elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Bandwidth of reads of `block_bytes` each, `readers` at a time, into memory that was in use before."""

    block_bytes: int
    readers: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class DiskProfile:
    """A file system: where it was measured (`folder`), what it is, and its speed at several block sizes.

    is_direct: reads go past the page cache. first_use_bytes_per_s: large reads into memory that was never used before,
    as when a model is read for the first time. cpu_s_per_byte: what large reads take of the cores, into used and into
    new memory. limit: of reads, by the control groups, as the kernel writes it.
    """

    folder: str
    device: str
    file_system: str
    is_direct: bool
    limit: str
    first_use_bytes_per_s: float
    cpu_s_per_byte: tuple[float, float]
    reads: tuple[ReadSpeed, ...]

    @property
    def bytes_per_s(self) -> float:
        """The bandwidth of the largest blocks; under a limit, which is the same for all sizes, the middle one found.

        What a limit allows counts over some time, so that a measurement may find more of it, or less.
        """
        if self.limit:
            return sorted(read.bytes_per_s for read in self.reads)[len(self.reads) // 2]
        return max(self.reads, key=lambda read: read.block_bytes).bytes_per_s

    def beside(self, other: DiskProfile) -> DiskProfile:
        """Return what the two are together, as they hold the same file: large reads go to both at once."""
        cpu_s = self.cpu_s_per_byte, other.cpu_s_per_byte
        return replace(
            self,
            first_use_bytes_per_s=self.first_use_bytes_per_s + other.first_use_bytes_per_s,
            cpu_s_per_byte=(max(one[0] for one in cpu_s), max(one[1] for one in cpu_s)),
            reads=(ReadSpeed(0, self.reads[0].readers, self.bytes_per_s + other.bytes_per_s),),
        )


def weight_kind(type_name: str, row_elements: int, *, by_expert: bool) -> str:
    """Return a name for the weights of a type and a length of rows, as `Q4_0/4096` or `Q4_0/768/experts`."""
    return f"{type_name}/{row_elements}{'/experts' * by_expert}"


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """How fast llama.cpp's kernels go through weights: bytes of weights a second, in a pass of `tokens` tokens.

    type_name: ggml's name of the type, as `Q4_0`. row_elements: length of the weights' rows. threads: 0 on a GPU.
    by_expert: as in a mixture of experts, each expert multiplied with `tokens` tokens.
    """

    type_name: str
    row_elements: int
    tokens: int
    threads: int
    by_expert: bool
    bytes_per_s: float

    @property
    def kind(self) -> str:
        """The kind of the weights; see `weight_kind`."""
        return weight_kind(self.type_name, self.row_elements, by_expert=self.by_expert)


@dataclass(frozen=True, slots=True)
class RepackedSpeed(KernelSpeed):
    """How fast a kernel for repacked weights is. repacked_bytes_per_s: of weights that a core repacks."""

    repacked_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """A device that llama.cpp could compute on, besides the CPU.

    name: what it is; backend: llama.cpp's name of it. kind: `discrete` (with memory of its own), `integrated` (with
    the machine's) or `software` (the processor plays one). upload_bytes_per_s: from the machine's memory to its own.
    kernels, node_s, attention_flops_per_s: as of the processor in `DeviceProfile`; nothing where they were not
    measured. border_s: what it costs to hand a pass from the processor to the GPU, or back.
    """

    name: str
    backend: str
    total_bytes: int
    free_bytes: int
    kind: str
    upload_bytes_per_s: float
    kernels: tuple[KernelSpeed, ...] = ()
    node_s: float = 0.0
    border_s: float = 0.0
    attention_flops_per_s: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """A device as measured at `measured_at` (ISO 8601, UTC).

    physical_cores, logical_cores: cores that this process may use, and their threads, as a CPU quota leaves time for.
    memory_limit_bytes: of the control group, 0 for none. node_s: what a node of a graph costs besides its work.
    stop_s: what it costs to stop a pass between two nodes. attention_flops_per_s: of flash attention on f16 keys and
    values in a pass of one token, and in one of many. repacked_kernels: those that compute several rows at once, whose
    numbers lie interleaved, for the weights that have one. is_disturbed: other programs were at work, or had taken the
    memory, while some of the figures were measured.
    """

    measured_at: str
    library: str
    cpu: str
    physical_cores: int
    logical_cores: int
    memory_bytes: int
    memory_limit_bytes: int
    node_s: float
    stop_s: float
    attention_flops_per_s: tuple[float, float]
    kernels: tuple[KernelSpeed, ...]
    disks: tuple[DiskProfile, ...]
    gpus: tuple[GpuProfile, ...]
    repacked_kernels: tuple[RepackedSpeed, ...] = ()
    is_disturbed: bool = False

    def repacking(self, kinds: Collection[str]) -> DeviceProfile:
        """Return this profile with the repacked kernels for weights of `kinds`, where these were measured."""
        repacked = [kernel for kernel in self.repacked_kernels if kernel.kind in kinds]
        plain = [kernel for kernel in self.kernels if kernel.kind not in {kernel.kind for kernel in repacked}]
        return replace(self, kernels=(*plain, *repacked))

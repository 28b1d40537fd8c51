"""What a plan has to keep to: a model, a budget, and what the process holds besides weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_run.base.results import GpuPlan, PlanItem
from edge_run.base.units import MIB
from edge_run.devices.host.memory import ProcessMemory, process_memory
from edge_run.runtime.planning.routing import Experience
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import TensorInfo
from edge_run.tiers.packed_file import PackedFile

if TYPE_CHECKING:
    from edge_run.runtime.llama.model import LlamaContext

RESERVE_BYTES = 32 * MIB
WORKER_RESERVE_BYTES = 20 * MIB  # of a device that computes layers for others, and makes no text
_WHOLE_NUMBERS = frozenset((0, 1, 30))  # f32, f16, bf16: of such weights the inputs stay, or get 2 bytes a number


@dataclass(frozen=True, slots=True)
class Holdings:
    """What the process holds besides weights.

    program_bytes: resident, Python and llama.cpp with its graphs. kv_bytes and buffer_bytes: allocated by llama.cpp's
    context, and counted in full, touched yet or not. work_bytes: what matrix multiplications will allocate for their
    inputs. draft_bytes: all that a draft model takes. upload_bytes: through which weights reach a GPU; gpu_bytes: what
    lies on a GPU without memory of its own.
    """

    program_bytes: int
    kv_bytes: int = 0
    buffer_bytes: int = 0
    work_bytes: int = 0
    draft_bytes: int = 0
    upload_bytes: int = 0
    gpu_bytes: int = 0
    reserve_bytes: int = RESERVE_BYTES

    @classmethod
    def now(cls) -> Holdings:
        """Return what is held before there is a context."""
        return cls(process_memory().resident_bytes)

    @classmethod
    def since(cls, before: ProcessMemory, context: LlamaContext, work_bytes: int) -> Holdings:
        """Return what is held after `context` was made; besides its buffers it takes what memory grew by."""
        after = process_memory()
        if not context.buffer_bytes:
            buffers = max(after.data_bytes - before.data_bytes, after.resident_bytes - before.resident_bytes)
            return cls(before.resident_bytes, context.kv_bytes, max(0, buffers - context.kv_bytes), work_bytes)
        graphs = max(0, after.resident_bytes - before.resident_bytes - context.kv_bytes)
        return cls(before.resident_bytes + graphs, context.kv_bytes, context.buffer_bytes, work_bytes)

    @property
    def total_bytes(self) -> int:
        """All of it, with a reserve for what Python and the tokenizer still allocate."""
        return sum(item.size_bytes for item in self.items())

    def items(self) -> tuple[PlanItem, ...]:
        """Return the plan's lines for all but weights."""
        draft = PlanItem("draft", self.draft_bytes, "the draft model: weights, keys and values, buffers, vocabulary")
        gpu = (
            PlanItem("gpu", self.gpu_bytes, "what lies on the GPU, which has no memory of its own"),
            PlanItem("upload", self.upload_bytes, "through which weights reach the GPU"),
        )
        return (
            *([draft] if self.draft_bytes else []),
            *(item for item in gpu if item.size_bytes),
            PlanItem("program", self.program_bytes, "Python, llama.cpp and the vocabulary"),
            PlanItem("kv", self.kv_bytes, "the context's keys and values"),
            PlanItem("buffers", self.buffer_bytes, "llama.cpp's compute and output buffers, as it reports them"),
            PlanItem("work", self.work_bytes, "inputs of matrix multiplications, converted for the kernels"),
            PlanItem("reserve", self.reserve_bytes, "for what is allocated later: text, samplers, thread stacks"),
        )


@dataclass(frozen=True, slots=True)
class Terms:
    """A model of which weights are to be placed, under a budget, beside what is held; `readers` read what streams.

    experience: what is known of how a mixture's experts are chosen and best read. expert_policy and
    expert_prefetch: as in `ModelConfig`. gpu: what lies on a GPU, and is not placed any more. packed: the
    experts again, compressed. lent_bytes: of the buffers, what passes of one token leave to weights.
    """

    gguf: GgufModel
    budget_bytes: int
    holdings: Holdings
    context_tokens: int
    micro_batch_tokens: int
    readers: int
    experience: Experience = field(default_factory=Experience)
    expert_policy: str = "default"
    expert_prefetch: str = "auto"
    gpu: GpuPlan | None = None
    packed: PackedFile | None = None
    lent_bytes: int = 0

    @property
    def packed_bytes(self) -> int:
        """What reading packed experts takes besides them."""
        return self.packed.memory_bytes(self.readers) if self.packed else 0


def work_bytes(gguf: GgufModel, micro_batch_tokens: int) -> int:
    """Return what ggml allocates to convert the widest input of a matrix multiplication.

    For quantised weights blocks of 8 bits a number, of which those with the most besides (Q8_K) take 1.14 bytes.
    """
    experts = used_experts(gguf)

    def row_bytes(tensor: TensorInfo) -> int:
        width = tensor.shape[0]
        if len(tensor.shape) > 2:
            return 2 * width * experts
        return 2 * width if tensor.type_id in _WHOLE_NUMBERS else -(-width * 8 // 7)

    return micro_batch_tokens * max((row_bytes(t) for t in gguf.tensors if len(t.shape) > 1), default=0)


def used_experts(gguf: GgufModel) -> int:
    """Return the experts that a token uses in a layer; 1 where the file does not say."""
    n_used = gguf.value("expert_used_count")
    return n_used if isinstance(n_used, int) and n_used > 0 else 1

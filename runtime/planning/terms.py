"""The terms of a plan: a model, a budget, and the memory that is not for weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from edge_run.base.results import GpuPlan
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.planning.routing import Experience
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.gguf_header import TensorInfo
from edge_run.tiers.packed_file import PackedFile

_WHOLE_NUMBERS = frozenset((0, 1, 30))  # f32, f16, bf16: of such weights the inputs stay, or get 2 bytes a number


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms under which a model's weights are placed.

    gguf: the headers of the model.
    budget_bytes: the memory budget.
    holdings: the memory that the process holds besides weights.
    context_tokens: the tokens of a context.
    micro_batch_tokens: the tokens of a full pass.
    readers: the number of reader threads.
    experience: how experts were chosen, and best read, in earlier runs.
    expert_policy: as in `ModelConfig`.
    expert_prefetch: as in `ModelConfig`.
    gpu: the part of the model that lies on a GPU, and needs no place.
    packed: the packed file of the experts.
    lent_bytes: the part of the buffers that is lent to weights in passes of one token.
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
        """The memory that reading packed experts takes besides the experts."""
        return self.packed.memory_bytes(self.readers) if self.packed else 0


def work_bytes(gguf: GgufModel, micro_batch_tokens: int) -> int:
    """Return the memory that ggml allocates to convert the largest input of a matrix multiplication.

    For quantised weights the input is converted to blocks with 8 bits a number; the largest of these (Q8_K) take 1.14
    bytes a number.
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

"""What a plan has to keep to: a model, a budget, and what follows from the two."""

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

"""A model before it is opened or planned: what its files say, and what of it goes where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edge_run.base.config import ModelConfig
from edge_run.base.profile import DeviceProfile
from edge_run.runtime.inspection.cache import Inspection
from edge_run.runtime.inspection.draft_file import DraftFile
from edge_run.runtime.llama.holdings import Holdings
from edge_run.runtime.planning import routing
from edge_run.runtime.planning.terms import Terms
from edge_run.tiers.gguf import GgufModel
from edge_run.tiers.packed_file import PackedFile

if TYPE_CHECKING:
    from edge_run.runtime.gpu.offload import Offload


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model, and how it is to be run.

    config: with room for guesses. why_plain: why llama.cpp's own loader runs it; empty where ours does. draft: the
    draft model's file. packed: the experts again, compressed. known: None where the file was not looked at. offload,
    draft_offload: what a GPU gets of either model. profile: of this device, where what a GPU gets was decided by it.
    """

    gguf: GgufModel
    config: ModelConfig
    budget_bytes: int
    why_plain: str = ""
    draft: DraftFile | None = None
    packed: PackedFile | None = None
    known: Inspection | None = None
    offload: Offload | None = None
    draft_offload: Offload | None = None
    profile: DeviceProfile | None = None

    def terms(self, holdings: Holdings, context_tokens: int, micro_batch_tokens: int) -> Terms:
        """Return what a plan has to keep to, in a process that holds `holdings` besides weights."""
        config = self.config
        return Terms(
            gguf=self.gguf,
            budget_bytes=self.budget_bytes,
            holdings=holdings,
            context_tokens=context_tokens,
            micro_batch_tokens=micro_batch_tokens,
            readers=config.readers,
            experience=routing.recall(self.gguf, config.cache),
            expert_policy=config.expert_policy,
            expert_prefetch=config.expert_prefetch,
            gpu=self.offload.plan if self.offload else None,
            packed=self.packed,
        )

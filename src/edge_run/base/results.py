"""What edge-run reports: frozen dataclasses, whose field names are the keys of `--json`.

Keys are stable: a field may be added, none is renamed or removed within a major version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from edge_run.base.mesh_status import MeshUse

# The log-probability of the token that was chosen, then those of the likeliest ones, the best first; each with its id.
TokenLogprobs: TypeAlias = "tuple[tuple[int, float], ...]"


@dataclass(frozen=True, slots=True)
class Backend:
    """Which loader runs the model: `edge-run`, or `llama.cpp` with the reason why."""

    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Numerics:
    """The numerics key: two runs with equal keys give equal logits, bit for bit.

    gpu: which one, and what of the model it computes; empty where there is none.
    use_extra_bufts: whether llama.cpp's own loader repacks all weights that it has kernels for.
    repacked: the kinds of weights that edge-run repacked. rope_factors: `short` or `long`, of a model that has both.
    kernels: what of the processor llama.cpp's kernels use: others sum in another order. pooling: of embeddings.
    rollback_tokens: by how many tokens recurrent state can be cut back, which takes kernels that keep more of it.
    batching: `unified` where what else is computed may change last digits, in passes shared by answers or texts;
        `streams` where each of these has cells of its own besides, so that only how many they are may.
    kv_keep: `pages N` and the like where each token of an answer looks at N rows of the context at most, which is
        lossy: then the bits are not those that llama.cpp gives. Else empty.
    """

    library: str
    use_extra_bufts: bool
    threads: int
    flash_attention: str
    kv_type_k: str
    kv_type_v: str
    micro_batch_tokens: int
    sequences: int
    exact: bool = False
    gpu: str = ""
    mesh_activations: str = "exact"
    repacked: str = ""
    rope_factors: str = ""
    rollback_tokens: int = 0
    batching: str = ""
    kernels: str = ""
    pooling: str = ""
    kv_keep: str = ""


@dataclass(frozen=True, slots=True)
class PlanItem:
    """One line of the plan: what takes memory, how much, and why that much."""

    what: str
    size_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Forecast:
    """How fast a plan will run on a device that was measured, for a prompt of `prompt_tokens` tokens.

    load_s: until the model is open. first_token_s: of a first prompt, which reads the model. prefill_tokens_per_s: of a
    later one. decode_tokens_per_s: after that prompt; 0 of a model for embeddings. read_s_per_token: then, too. limit:
    of decoding, `disk` or `compute`. parallel: answers at once. parallel_tokens_per_s: theirs, or 0.
    read_bytes_per_token, compute_s_per_token: as read_s_per_token; bytes of keys and values without room included.
    """

    prompt_tokens: int
    load_s: float
    first_token_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    compute_s_per_token: float
    read_s_per_token: float
    limit: str
    parallel: int = 1
    parallel_tokens_per_s: float = 0.0
    read_bytes_per_token: int = 0


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """The part of a model on a GPU.

    device: as llama.cpp names it. kind: as in `GpuProfile`. budget_bytes: of its memory. weights_bytes, kv_bytes,
    buffer_bytes, draft_bytes: what lies there of weights, keys and values, buffers, and of the draft model.
    layers: how many layers lie there, counted from the end of the model; the output counts as one.
    narrow_layers: how many of these, the first ones, leave their widest weights in DRAM (experts, or feed-forward).
    op_offload: whether passes of many tokens run there whole, with copies of the weights in DRAM.
    """

    device: str
    kind: str
    budget_bytes: int
    weights_bytes: int
    kv_bytes: int
    buffer_bytes: int
    layers: int
    narrow_layers: int
    draft_bytes: int = 0
    op_offload: bool = False


@dataclass(frozen=True, slots=True)
class ContextPoint:
    """How a token is made when the context has `tokens` tokens, of a plan that lends memory to weights.

    weights_bytes: the weights that stay in memory then. streamed_bytes_per_pass and kv_bytes_per_pass: what it reads of
    these, and of keys and values that have no room. decode_tokens_per_s: 0 where the device was not measured.
    """

    tokens: int
    weights_bytes: int
    streamed_bytes_per_pass: int
    decode_tokens_per_s: float = 0.0
    kv_bytes_per_pass: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """What goes where, decided before any weight is loaded.

    mode: `resident` (all in memory, llama.cpp at full speed), `streamed`, or `llama.cpp` (its own loader, nothing
    promised). items: what the budget is spent on; their sizes add up to at most budget_bytes. forecast: None where the
    device was not measured. expert_bytes: what experts have, where they stream by expert; a pass then reads
    what it lacks of those it uses, and streamed_bytes_per_pass is for one token, if they are chosen as in earlier runs.
    context_tokens: as many as the budget has room for, of the wanted_context_tokens that were asked for.
    lent_bytes: of all that is not for weights, what these have at first while passes are of few tokens;
    streamed_bytes_per_pass is for those, streamed_bytes_per_batch for passes of many tokens, beside which nothing is
    lent. by_context: how that changes while the context fills. micro_batch_tokens: of one pass of a prompt, which the
    minimum is for. spilled_kv_bytes: keys and values of a full context that have no room in kv_bytes of memory.
    kv_type_reason: what was weighed for the type of keys and values (`auto`). read_repacked: repacked weights that
    stream are read so from a packed file. pinned_bytes: of weights that stay; window_bytes: room for those that stream.
    """

    mode: str
    budget_bytes: int
    minimum_bytes: int
    model_bytes: int
    pinned_bytes: int
    window_bytes: int
    streamed_bytes_per_pass: int
    kv_bytes: int
    context_tokens: int
    readers: int
    items: tuple[PlanItem, ...] = ()
    forecast: Forecast | None = None
    expert_bytes: int = 0
    gpu: GpuPlan | None = None
    lent_bytes: int = 0
    wanted_context_tokens: int = 0
    streamed_bytes_per_batch: int = 0
    by_context: tuple[ContextPoint, ...] = ()
    micro_batch_tokens: int = 0
    repacked: tuple[str, ...] = ()
    read_repacked: bool = False
    spilled_kv_bytes: int = 0
    kv_type_reason: str = ""


@dataclass(frozen=True, slots=True)
class Sweep:
    """Plans of one model under several budgets, from the smallest that works to one that holds all of it."""

    plans: tuple[Plan, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the work at hand is.

    stage: `reading` (the model, at first) or `prompt`. share: of its time, 0 to 1. remaining_s: None if unknown.
    """

    stage: str
    done_tokens: int
    all_tokens: int
    share: float
    elapsed_s: float
    remaining_s: float | None


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes: the budget, the process's peak so far (VmHWM), weights that stay, room for those that stream, KV cache."""

    budget_bytes: int
    peak_bytes: int
    pinned_bytes: int
    window_bytes: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class IoUse:
    """What was read from storage during a generation.

    bytes_per_token: decode only. bandwidth_bytes_per_s: bytes over the time in which a read was in flight.
    efficiency: the longer of compute time and read time, over the wall time of decode; 1.0 is the physical limit.
    copy_bytes: from a second drive. repeated_reads: as one of two drives failed. cached_bytes: from the page cache.
    """

    bytes_read: int
    bytes_per_token: float
    bandwidth_bytes_per_s: float
    efficiency: float
    copy_bytes: int = 0
    repeated_reads: int = 0
    cached_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TuningDecision:
    """The result of comparing two settings of a tunable.

    tunable: its name. setting: what is used since; other: what is not; tried: the new one. tokens: those compared.
    gain: how much faster `tried` was, as a share; with probability `confidence` it is between gain_low and gain_high.
    """

    tunable: str
    setting: str
    other: str
    tried: str
    gain: float
    gain_low: float
    gain_high: float
    confidence: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ExpertUse:
    """How a mixture of experts was streamed since it was opened, in `tokens` passes of one token each.

    hit_rate: of the bytes that tokens used, the share in memory. prefetched_bytes: read before a layer asked for them;
    unused_bytes: those of them evicted before use. tunables, decisions: settings found so far, comparisons decided.
    """

    tokens: int
    hit_rate: float
    prefetched_bytes: int
    unused_bytes: int
    tunables: dict[str, str]
    decisions: tuple[TuningDecision, ...]


@dataclass(frozen=True, slots=True)
class KvSpill:
    """The keys and values that went to a file and came back since the model was opened; away_bytes: those there now."""

    written_bytes: int
    read_bytes: int
    away_bytes: int


@dataclass(frozen=True, slots=True)
class KvKeep:
    """Attention on a part of the context, which is lossy: `kind`, of `tokens` at most; share: of what was there."""

    kind: str
    tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class Speculation:
    """How several tokens were verified in one pass.

    mode: `off`, `ngram`, `draft`, or `draft+ngram`; reason: why it is off although it was asked for, or what limits it.
    passes: after the prompt. drafted: guesses that were verified; accepted: those that came true and were used.
    acceptance_by_depth: of the guesses at depth 1, 2, ... how many came true. widths: passes by their number of tokens.
    switched_off_share: of the passes, those in which plain decoding was expected to be faster. draft_s: making guesses.
    plain_token_s: of a token without speculation, as passes of one token took here; gain: speed of decoding over that.
    expected_tokens_per_pass, expected_gain: what the controller expected before each pass. noise: how far a logit may
    differ between widths (0: not at all); near_ties: tokens that were chosen in a wider pass where the two best logits
    were closer than that: plain decoding may choose otherwise.
    decisions: whether guessing beside the passes (`overlap`) was found to pay, once that was compared.
    """

    mode: str = "off"
    reason: str = ""
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens_per_pass: float = 0.0
    expected_tokens_per_pass: float = 0.0
    acceptance_by_depth: tuple[float, ...] = ()
    widths: dict[int, int] = field(default_factory=dict)
    switched_off_share: float = 0.0
    draft_s: float = 0.0
    plain_token_s: float = 0.0
    gain: float = 1.0
    expected_gain: float = 1.0
    noise: float = 0.0
    near_ties: int = 0
    decisions: tuple[TuningDecision, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. id: that no other call has. arguments: the JSON of an object; parsed: that object."""

    id: str
    name: str
    arguments: str
    parsed: dict[str, Any] = field(compare=False, repr=False)

    def document(self) -> dict[str, Any]:
        """Return the call as messages have it, in OpenAI's words."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished answer and its figures; `repr` leaves out those that are objects of their own.

    finish_reason: `stop` (the model or a stop string ended it), `tool_calls` (likewise, and it calls tools), `length`
        (max_tokens), `context` (full), `cancelled`, or `deadline` (its time was over).
    cached_tokens: how much of the prompt was in the KV cache already. ttft_s: from the request to the first token.
    dropped_messages: the oldest messages, left out for want of room. stop_text: the stop string that ended it, if any.
    shifted_tokens: those that a context shift took out; what came after is not what the model gives for what was left.
    tool_calls: the calls of tools. content, reasoning: what else is said, and thought; None but for a conversation.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    load_s: float
    ttft_s: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    memory: MemoryUse = field(repr=False)
    io: IoUse = field(repr=False)
    numerics: Numerics = field(repr=False)
    plan: Plan = field(repr=False)
    backend: Backend = field(repr=False)
    experts: ExpertUse | None = field(default=None, repr=False)
    speculation: Speculation = field(default_factory=Speculation, repr=False)
    mesh: MeshUse | None = field(default=None, repr=False)
    logprobs: tuple[TokenLogprobs, ...] = field(default=(), repr=False)
    kv_spill: KvSpill | None = None
    kv_keep: KvKeep | None = None
    dropped_messages: int = 0
    shifted_tokens: int = 0
    stop_text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    content: str | None = None
    reasoning: str | None = None

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message that the conversation goes on with, in OpenAI's words; thoughts only with calls."""
        made = {"role": "assistant", "content": self.text if self.content is None else self.content}
        calls = {"tool_calls": [call.document() for call in self.tool_calls], "reasoning_content": self.reasoning}
        return {**made, **{key: value for key, value in calls.items() if value and self.tool_calls}}


@dataclass(frozen=True, slots=True)
class Stats:
    """Figures of an open model since it was opened."""

    load_s: float
    generations: int
    prompt_tokens: int
    completion_tokens: int
    memory: MemoryUse
    io: IoUse
    backend: Backend
    experts: ExpertUse | None = None
    kv_spill: KvSpill | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One step of a stream. text may be empty while a character is incomplete; the last piece has `generation`.

    logprobs: of its token, before anything was done to the logits, if asked for. content, reasoning: of `Generation`.
    """

    text: str
    token_ids: tuple[int, ...] = field(default=())
    generation: Generation | None = None
    logprobs: TokenLogprobs | None = None
    content: str | None = None
    reasoning: str | None = None

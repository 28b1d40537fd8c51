"""How a model is opened: a frozen dataclass that refuses impossible values on construction."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, get_args

from edge_run.base.errors import option
from edge_run.base.files.folders import cache_folder
from edge_run.base.options import check_types, require
from edge_run.base.units import GIB, MIB, parse_size

KV_TYPES: tuple[str, ...] = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_UNQUANTISED = ("f32", "f16", "bf16")
_TURNED = ("f32", "f16")  # keys that llama.cpp can turn to another position without rounding them to blocks
KV_AUTO, _DEFAULT_KV_TYPE = "auto", "f16"
WIDEST_MICRO_BATCH = 512  # where the width of passes is left open
MOST_THREADS = 512
MOST_CONTEXT_TOKENS = 2**31 - 1  # llama.cpp counts positions in 32 bits
PACKED_OFF = "off"
PROMPT_CACHE_ON, PROMPT_CACHE_OFF = "on", "off"
LEAST_KV_KEEP = 64
KV_SPILL_ON, KV_SPILL_OFF = "on", "off"
_SWITCH_WORDS = frozenset(("0", "1", "true", "false", "t", "f", "yes", "no", "y", "n", "on", "off"))
REQUEST_TOKENS = 512
PROMPT_TOKENS = 512  # of the prompt that a forecast is for, where nobody says another number
PROMPT_CACHE_BYTES, PROMPT_CACHE_DAILY_BYTES = 4 * GIB, 32 * GIB
MOST_DRAFT_TOKENS = 127
LEAST_CHUNK_BYTES, CHUNK_BYTES = mmap.PAGESIZE, 2 * MIB

Backend: TypeAlias = Literal["auto", "edge-run", "llama.cpp"]
ExpertPolicy: TypeAlias = Literal["default", "lru", "lfu", "layer-lru", "layer-lfu"]
ExpertPrefetch: TypeAlias = Literal["auto", "off", "1", "1+", "2"]
FlashAttention: TypeAlias = Literal["auto", "on", "off"]
KvKeepBy: TypeAlias = Literal["pages", "blocks", "window"]
MeshActivations: TypeAlias = Literal["exact", "compact"]
PageCache: TypeAlias = Literal["auto", "off"]
Pooling: TypeAlias = Literal["auto", "none", "mean", "cls", "last", "rank"]  # after `auto` as llama.cpp numbers them
Repack: TypeAlias = Literal["auto", "on", "off"]
Speculate: TypeAlias = Literal["auto", "off", "ngram", "draft"]
BACKENDS = get_args(Backend)
EXPERT_POLICIES = get_args(ExpertPolicy)
EXPERT_PREFETCH = get_args(ExpertPrefetch)
FLASH_ATTENTION = get_args(FlashAttention)
MESH_ACTIVATIONS = get_args(MeshActivations)
PAGE_CACHE = get_args(PageCache)
POOLING = get_args(Pooling)
REPACK = get_args(Repack)
SPECULATE = get_args(Speculate)
_, KV_KEEP_BLOCKS, KV_KEEP_WINDOW = KV_KEEP_BY = get_args(KvKeepBy)


def kv_types(kv_type: str) -> tuple[str, str]:
    """Return the types of K and of V in `K/V`, or in one word for both."""
    k, _, v = kv_type.partition("/")
    return k, v or k


def check_threads(threads: int | None) -> None:
    """Raise ConfigError for a number of compute threads that cannot be; None is one for each core."""
    require(threads is None or 1 <= threads <= MOST_THREADS, f"threads {threads}: must be 1 to {MOST_THREADS}")


def _check_folder(what: str, place: Path | str) -> None:
    """Raise ConfigError for a `place` that is no folder, `on` or `off`, or by which these were most likely meant."""
    require(str(place) != "", f"{what}: names no folder; give one, on or off")
    is_switch = isinstance(place, str) and place.casefold() in _SWITCH_WORDS and place not in ("on", "off")
    require(not is_switch, f"{what} {place!r}: must be on, off or a folder; a folder of that name is ./{place}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """How a model is opened. Everything that changes the numbers is part of the numerics key.

    It is over 200 lines because what each setting means, and which exclude each other, is said in one place.

    memory: budget for the whole process, bytes or text (`4GiB`); None is what is available less a margin.
    gpu_memory: budget of a GPU's memory, for weights, keys and values, and buffers there; 0, the default, leaves it
        out, as nothing is lent to weights beside a GPU; None is what is free less a margin, and nothing where the
        processor plays the GPU.
    op_offload: whether passes of many tokens are computed on the GPU whole, with weights in DRAM copied to it for each;
        None: where it has memory of its own.
    context_tokens: length of the context; None is the model's own, as far as that costs nothing, and at
        least 4096; 0 is the model's own.
    threads: compute threads; None is one per physical core that this process may use, and has time for under a quota.
    micro_batch_tokens: tokens in one pass of a prompt; 0 is as many as are expected to be fastest, 512 at most.
    sequences: answers that may share passes, and the context's cells; 0 is the number that is forecast to make the most
        tokens a second.
    request_tokens: what each of several requests is taken to have in forecasts, its prompt and its answer together.
    branches: sequences besides, for the branches of guesses; as many as the guessing needs, whatever is given.
    rollback_tokens: tokens by which recurrent state can be cut back, at most; where guesses are made, what that needs.
    outputs_per_pass: tokens of one pass whose logits may be asked for, at least one for each sequence; more takes more
        memory (a row of logits each).
    kv_type: type of both K and V, or of K and V when written `K/V` (`q8_0/q4_0`); `auto` is what room, time and
        quality speak for, when the model is opened.
    flash_attention: `on`, `off`, or `auto`, which is on where llama.cpp has it for the model.
    backend: `edge-run` (our memory), `llama.cpp` (its own loader), or `auto` (ours where it works).
    readers: reader threads; a model streamed by expert tries half as many too.
    also: a copy of the model on a second drive, its only or first file, or a folder that has it under the same names:
        both are read at once.
    page_cache: `auto` reads a model that fits from the kernel's page cache as far as it lies there, and leaves it there
        for the next start where memory beyond the run is free; `off` leaves nothing there. What streams never does.
    expert_policy: which experts stay in memory.
    expert_prefetch: how many layers ahead experts are read that are likely to be chosen (`1+`: one, asked twice);
        `auto` compares the settings as it goes.
    packed: a file of the experts, compressed (`edge-run pack`), to be read; None is the one beside the model, where it
        is there and measures faster; `off` is none.
    cache_folder: where findings about models and devices are saved; None is `~/.cache/edge-run`, or where the system
        has caches.
    prompt_cache: `on` keeps what was computed of prompts in `prompts` of the cache folder, to be read back for prompts
        that begin alike; a path keeps it there; `off` keeps nothing.
    prompt_cache_size: what of the disk that may take, bytes or text; the least recently used goes first.
    prompt_cache_daily: what may be written there in a day, bytes or text, as flash wears out by writing.
    kv_spill: `on` writes keys and values that have no room in memory to a file without a name in `spill` of the cache
        folder, and reads them for each token; a path has it there; `off` ends the text where memory ends. Several
        `sequences` have an equal part of the context each then.
    kv_keep: each token of an answer looks at so many rows of the context at most; 0 is all of them. With less than all
        what is computed is not the model's, but cheaper.
    kv_keep_by: which rows those are: `pages` of 16 whose keys answer the query best, and the latest, `blocks` of 256
        alike, as a file has them (`kv_spill`), or `window`: the first four and the latest.
    context_shift: where the context is full, take tokens out of its middle and go on, as llama.cpp's server does; what
        follows is not what the model gives for the text that is left.
    context_keep_tokens: the first tokens, which stay then, and one more where the vocabulary adds a BOS token; -1 is
        those of the prompt.
    check_file: open a file that is not known in a child process first: llama.cpp ends over some broken files.
    draft: a small model, which guesses what comes next; best one with the same tokens.
    speculate: how tokens are guessed, to be verified in one pass: `draft` (by that model), `ngram` (from the text so
        far), `off`, or `auto`, which is both with a draft model and nothing without one.
    draft_tokens: guesses in one pass at most.
    exact: compute so that tokens are the same, speculation or not: no flash attention, no pass of a single token.
    repack: whether weights lie in memory as llama.cpp's kernels for several rows at once want them: `on`,
        all that have such a kernel, as with llama.cpp's own loader by default; `off`, none; `auto`, the types that
        measured faster on this device (`edge-run probe`), none where it was not measured.
    chunk_bytes: the unit in which weights are read and moved, a power of two, a page or more; less than the default is
        for tests.
    mesh_activations: the form of activations between devices of a mesh: `exact`, or `compact`, which rounds them to
        8 bits a number where that saves time on a slow link, so that tokens may differ from those of one device.
    embeddings: whether the model is opened for the vectors of texts (`Model.embed`) and not to generate text; None is
        where its file is made for that: an encoder, or a file that names a pooling.
    pooling: how one vector is made of those of a text's tokens: `mean`, `cls` (the first), `last`; `none` keeps one for
        each token, `rank` gives a reranker's scores; `auto` is what the file says, else `mean` for an encoder, and
        `last` for other models.
    """

    memory: int | str | None = None
    gpu_memory: int | str | None = 0
    op_offload: bool | None = None
    context_tokens: int | None = None
    threads: int | None = None
    micro_batch_tokens: int = 0
    sequences: int = 1
    request_tokens: int = REQUEST_TOKENS
    branches: int = 0
    rollback_tokens: int = 0
    outputs_per_pass: int = 1
    kv_type: str = _DEFAULT_KV_TYPE
    flash_attention: FlashAttention = "auto"
    backend: Backend = "auto"
    readers: int = 4
    also: Path | str | None = None
    page_cache: PageCache = "auto"
    expert_policy: ExpertPolicy = "default"
    expert_prefetch: ExpertPrefetch = "auto"
    packed: Path | str | None = None
    cache_folder: Path | str | None = None
    prompt_cache: Path | str = PROMPT_CACHE_OFF
    prompt_cache_size: int | str = PROMPT_CACHE_BYTES
    prompt_cache_daily: int | str = PROMPT_CACHE_DAILY_BYTES
    kv_spill: Path | str = KV_SPILL_OFF
    kv_keep: int = 0
    kv_keep_by: KvKeepBy = "pages"
    context_shift: bool = False
    context_keep_tokens: int = 4
    check_file: bool = True
    draft: Path | str | None = None
    speculate: Speculate = "auto"
    draft_tokens: int = 47
    exact: bool = False
    mesh_activations: MeshActivations = "exact"
    repack: Repack = "auto"
    chunk_bytes: int = CHUNK_BYTES
    embeddings: bool | None = None
    pooling: Pooling = "auto"

    def __post_init__(self) -> None:
        if self.memory is not None:
            object.__setattr__(self, "memory", parse_size(self.memory))
        if self.gpu_memory is not None:
            object.__setattr__(self, "gpu_memory", parse_size(self.gpu_memory, least_bytes=0))
        object.__setattr__(self, "prompt_cache_size", parse_size(self.prompt_cache_size))
        object.__setattr__(self, "prompt_cache_daily", parse_size(self.prompt_cache_daily))
        check_types(self)
        _check_folder("prompt cache", self.prompt_cache)
        context = self.context_tokens
        require(
            context is None or 0 <= context <= MOST_CONTEXT_TOKENS,
            f"context length {context}: must be 0 (the model's own) or up to {MOST_CONTEXT_TOKENS} tokens",
        )
        check_threads(self.threads)
        width = self.micro_batch_tokens
        require(width >= 0, f"micro-batch {width}: must be at least 1 token, or 0, which leaves it to the planner")
        require(0 <= self.sequences <= 256, f"sequences {self.sequences}: must be 1 to 256, or 0 (automatic)")
        require(self.request_tokens >= 1, f"request tokens {self.request_tokens}: must be at least 1")
        require(self.outputs_per_pass >= 1, f"outputs per pass {self.outputs_per_pass}: must be at least 1")
        require(1 <= self.readers <= 64, f"readers {self.readers}: must be 1 to 64 threads")
        for kind in self.kv_types:
            require(kind in KV_TYPES, f"KV type {kind!r}: must be auto or one of {', '.join(KV_TYPES)}, or two as K/V")
        require(
            self.kv_type != KV_AUTO or self.gpu_memory == 0,
            f"KV type auto: is weighed for the processor alone; name one, or give {option('gpu_memory', 0)}",
        )
        require(
            LEAST_CHUNK_BYTES <= self.chunk_bytes <= CHUNK_BYTES and self.chunk_bytes & (self.chunk_bytes - 1) == 0,
            f"chunk of {self.chunk_bytes} bytes: must be a power of two from {LEAST_CHUNK_BYTES} to {CHUNK_BYTES}",
        )
        require(str(self.also) != "", "also: names no file; give a copy of the model, or leave it out")
        self._check_speculation()
        self._check_spill()
        self._check_shift()
        self._check_keep()

    def _check_spill(self) -> None:
        _check_folder("kv spill", self.kv_spill)
        if not self.spills_kv:
            return
        self._check_no_gpu("kv spill")
        loader = option("backend")
        require(self.backend != "llama.cpp", f"kv spill: llama.cpp's own loader has none; leave out {loader}")

    def _check_keep(self) -> None:
        if not self.kv_keep:
            return
        require(self.kv_keep >= LEAST_KV_KEEP, f"kv keep {self.kv_keep}: must be 0 or {LEAST_KV_KEEP} tokens or more")
        require(
            self.flash_attention != "off" and not self.exact and self.kv_types[0] == "f16",
            f"kv keep: needs flash attention, and keys of 16 bits (f16); leave out {option('exact')}, "
            f"{option('flash_attention', 'off')} and {option('kv_type', flag='-ctk')}",
        )
        require(
            self.gpu_memory == 0 and self.backend != "llama.cpp",
            "kv keep: runs on the processor, with the callback of edge-run; "
            f"leave out {option('gpu_memory')} and {option('backend')}",
        )
        require(
            self.sequences == 1 and self.draft_model is None and not self.uses_lookup and not self.context_shift,
            f"kv keep: is for one text at a time, without guesses and shifts; give {option('sequences', 1)}, or leave "
            f"out {option('draft')}, {option('speculate')} and {option('context_shift')}",
        )

    def _check_shift(self) -> None:
        keep = self.context_keep_tokens
        require(keep >= -1, f"context keep {keep}: must be -1 (the whole prompt) or a number of tokens")
        if not self.context_shift:
            return
        require(not self.spills_kv, f"context shift: needs all keys in memory; leave out {option('kv_spill')}")
        self._check_no_gpu("context shift")
        require(
            self.kv_types[0] in _TURNED,
            f"context shift: keys of {self.kv_types[0]} cannot be turned to their new positions, or would be rounded "
            f"once more each time; give {option('kv_type', 'f16', '-ctk')} or f32",
        )
        require(
            self.sequences == 1 and self.draft_model is None and not self.uses_lookup,
            f"context shift: is for one text at a time, without guesses; give {option('sequences', 1)}, or leave out "
            f"{option('draft')} and {option('speculate')}",
        )

    def _check_speculation(self) -> None:
        if self.draft is not None:
            object.__setattr__(self, "draft", Path(self.draft))
        tokens = self.draft_tokens
        require(1 <= tokens <= MOST_DRAFT_TOKENS, f"draft tokens {tokens}: must be 1 to {MOST_DRAFT_TOKENS}")
        require(
            self.speculate != "draft" or self.draft is not None,
            f"speculate draft: needs a draft model; give one ({option('draft')})",
        )
        if self.repack == "on":
            self._check_no_gpu("repack on")
        if self.exact:
            self._check_exact()

    def _check_exact(self) -> None:
        require(self.flash_attention != "on", f"exact: excludes flash attention; leave out {option('flash_attention')}")
        width = option("micro_batch_tokens")
        require(self.micro_batch_tokens != 1, f"exact: needs a micro-batch ({width}) of at least 2 tokens")
        require(
            self.kv_types[1] in _UNQUANTISED,
            f"exact: excludes {self.kv_types[1]} for V, which needs flash attention; "
            f"give {option('kv_type', 'f16', '-ctv')}",
        )
        if self.gpu_memory is not None:
            self._check_no_gpu("exact")
        object.__setattr__(self, "flash_attention", "off")
        object.__setattr__(self, "gpu_memory", 0)

    def _check_no_gpu(self, what: str) -> None:
        require(self.gpu_memory == 0, f"{what}: runs on the processor alone; give {option('gpu_memory', 0)}")

    @property
    def draft_model(self) -> Path | None:
        """The draft model that is used; None where there is none."""
        return Path(self.draft) if self.draft is not None and self.speculate in ("auto", "draft") else None

    @property
    def packed_file(self) -> Path | None:
        """The packed file that was named; None where none was."""
        return Path(self.packed) if self.packed is not None and self.packed != PACKED_OFF else None

    @property
    def uses_lookup(self) -> bool:
        """Whether the text so far is used to guess what comes next."""
        return self.speculate == "ngram" or (self.speculate == "auto" and self.draft is not None)

    @property
    def cache(self) -> Path:
        """The cache folder, named or not. Raises ConfigError where the user has no home folder."""
        return Path(self.cache_folder) if self.cache_folder else cache_folder()

    @property
    def keeps_prompts(self) -> bool:
        """Whether prompts are kept on disk."""
        return str(self.prompt_cache) != PROMPT_CACHE_OFF

    @property
    def prompt_folder(self) -> Path:
        """Where prompts are kept, which must be (`keeps_prompts`). Raises ConfigError without a home folder."""
        assert self.keeps_prompts, "no prompts are kept"
        return self.cache / "prompts" if str(self.prompt_cache) == PROMPT_CACHE_ON else Path(self.prompt_cache)

    @property
    def most_prompt_bytes(self) -> int:
        """What kept prompts may take of the disk, in bytes."""
        return parse_size(self.prompt_cache_size)

    @property
    def most_daily_prompt_bytes(self) -> int:
        """What may be written of prompts in a day, in bytes."""
        return parse_size(self.prompt_cache_daily)

    @property
    def spills_kv(self) -> bool:
        """Whether keys and values may lie in a file."""
        return str(self.kv_spill) != KV_SPILL_OFF

    @property
    def spill_folder(self) -> Path:
        """Where that file is. Raises ConfigError where the user has no home folder."""
        return self.cache / "spill" if str(self.kv_spill) == KV_SPILL_ON else Path(self.kv_spill)

    @property
    def kv_types(self) -> tuple[str, str]:
        """The types of K and of V; those that `auto` begins with."""
        return kv_types(_DEFAULT_KV_TYPE if self.kv_type == KV_AUTO else self.kv_type)


class ModelOptions(TypedDict, total=False):
    """The fields of `ModelConfig` as keywords that may each be given, for who checks types."""

    memory: int | str | None
    gpu_memory: int | str | None
    op_offload: bool | None
    context_tokens: int | None
    threads: int | None
    micro_batch_tokens: int
    sequences: int
    request_tokens: int
    branches: int
    rollback_tokens: int
    outputs_per_pass: int
    kv_type: str
    flash_attention: FlashAttention
    backend: Backend
    readers: int
    also: Path | str | None
    page_cache: PageCache
    expert_policy: ExpertPolicy
    expert_prefetch: ExpertPrefetch
    packed: Path | str | None
    cache_folder: Path | str | None
    prompt_cache: Path | str
    prompt_cache_size: int | str
    prompt_cache_daily: int | str
    kv_spill: Path | str
    kv_keep: int
    kv_keep_by: KvKeepBy
    context_shift: bool
    context_keep_tokens: int
    check_file: bool
    draft: Path | str | None
    speculate: Speculate
    draft_tokens: int
    exact: bool
    mesh_activations: MeshActivations
    repack: Repack
    chunk_bytes: int
    embeddings: bool | None
    pooling: Pooling

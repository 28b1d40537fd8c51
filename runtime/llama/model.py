"""One model and one context of llama.cpp, opened and closed again; what memory lies under them is decided elsewhere."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from edge_run.base.closing import Closing
from edge_run.base.config import POOLING
from edge_run.base.errors import (
    BudgetError,
    ConfigError,
    EdgeRunError,
    KernelError,
    ModelFileError,
    NotSupported,
    option,
)
from edge_run.base.units import MIB
from edge_run.runtime.llama import _ggml as ggml
from edge_run.runtime.llama._ggml import L
from edge_run.runtime.llama.cache_memory import CacheMemory
from edge_run.runtime.llama.context_shape import ContextShape
from edge_run.runtime.llama.library import library_version
from edge_run.runtime.llama.load_placement import LoadPlacement
from edge_run.runtime.llama.logit_rows import LogitRows
from edge_run.runtime.llama.pass_batch import PassBatch
from edge_run.runtime.llama.spelling import Spelling
from edge_run.runtime.llama.splitting import Splitting
from edge_run.runtime.processes.visitors import Visitors

DECODED, STOPPED, FAILED = 0, 2, -3  # what llama.cpp returns of a pass that was begun; 2 when it was told to stop

_Result = TypeVar("_Result")
_BUFFER = re.compile(r"(\S+) +(?:compute|output) buffer size =\s*([\d.]+) MiB")
_CACHE_PART = re.compile(r"(\S+) +(?:KV|RS|DSV4 .*state) buffer size =\s*([\d.]+) MiB")
_CACHE = re.compile(r"(?<!buffer )size =\s*([\d.]+) MiB(?:.*?(\d+) layers)?")
_OF_CELLS = "llama_kv_cache"
_LAYERS = re.compile(r"(\d+) cells, *(\d+) layers")
_TELLING = ("error", "fail", "require")
_NO_ROOM = ("unable to allocate", "failed to allocate", "out of memory")
_READY_TO_MAP = ("print_info:", "load_tensors:")


class _Lines:
    """The last lines that llama.cpp logged, to say why something failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, line: str) -> None:
        if line.strip():
            self.lines.append(line.strip())

    def cell_layers(self) -> list[tuple[int, int]]:
        """Return of each cache with cells how many it has, and in how many layers."""
        lines = (line for line in self.lines if line.startswith(_OF_CELLS))  # not of recurrent states
        return [(int(found[1]), int(found[2])) for line in lines if (found := _LAYERS.search(line))]

    def sizes(self, pattern: re.Pattern[str], place: str) -> tuple[int, int]:
        """Return the bytes that lines like `pattern` tell of: those at `place`, and those elsewhere."""
        found = [(name, int(float(size) * MIB)) for line in self.lines for name, size in pattern.findall(line)]
        there = sum(size for name, size in found if name == place)
        return there, sum(size for _, size in found) - there

    def reason(self) -> str:
        told = [line for line in self.lines if any(word in line.lower() for word in _TELLING)]
        text = " ".join((told or self.lines or ["no reason given"])[0].split())
        return re.sub(r"^\w+: (?:error loading model: )?(?:error loading model \w+: )?", "", text)[:300]


def _refusal(path: Path, reason: str, *, has_gpu: bool) -> EdgeRunError:
    if any(words in reason for words in _NO_ROOM):
        return BudgetError(
            f"{path}: llama.cpp cannot load it: {reason}: less memory is free there than was asked for; "
            + (f"lower {option('gpu_memory')}, or give 0 to leave the GPU out" if has_gpu else "close other programs")
        )
    if "unknown model architecture" in reason:
        return NotSupported(
            f"{path}: llama.cpp cannot load it: {reason}; install a llama-cpp-python that knows it, or give another "
            f"model (here is {library_version()})"
        )
    return ModelFileError(
        f"{path}: llama.cpp cannot load it: {reason}; copy or download the file again, or install a llama-cpp-python "
        "that knows it"
    )


def _load(paths: Sequence[Path], params: Any) -> Any:
    names = ggml.string_array([os.fsencode(path) for path in paths])
    if len(paths) == 1:
        return L.llama_model_load_from_file(names[0], params)
    return L.llama_model_load_from_splits(names, len(paths), params)


class LlamaModel(Closing):
    """A loaded model: weights described, vocabulary read. A context manager; closing is idempotent.

    What turns texts into tokens and back is thread-safe, and raises ConfigError once `visitors` are let in no more.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        on_header_read: Any = None,
        metadata: dict[str, int | str] | None = None,
        mode: str = "mapped",
        path: Path | None = None,
        placement: LoadPlacement | None = None,
        on_tensor: Callable[[], None] | None = None,
        is_repacked: bool = False,
    ) -> None:
        """Load from the shards at `paths`, mapped, on the CPU but for what `placement` says.

        on_header_read is called once between the reading of the header and the mapping, on_tensor before each tensor
        is read, copied to a GPU or left where it was mapped; what that raises ends the loading. metadata: instead of
        the file's own. mode: `mapped`; `read`, into memory of llama.cpp's own; `sized`, of which contexts allocate
        nothing and only tell their sizes; `vocabulary`, which has nothing else. path: the file that errors name, the
        first of `paths` by default. is_repacked: whether llama.cpp repacks what it has kernels for, into memory of its
        own. Raises ModelFileError with llama.cpp's own reason when it refuses the file, NotSupported when it does not
        know the architecture, BudgetError when memory is short.
        """
        self.path = path or paths[0]
        L.llama_backend_init()
        lines = _Lines()
        is_read = False

        def listen(line: str) -> None:
            nonlocal is_read
            lines.add(line)
            if not is_read and on_header_read and line.startswith(_READY_TO_MAP):
                is_read = True
                on_header_read()

        params = L.llama_model_default_params()
        params.load_mode = ggml.LOAD_MODE_MMAP if mode in ("mapped", "vocabulary") else ggml.LOAD_MODE_NONE
        params.lazy_mode, params.no_alloc = ggml.LAZY_MODE_OFF, mode == "sized"
        params.use_extra_bufts, params.n_gpu_layers = is_repacked, 0
        params.vocab_only = mode == "vocabulary"
        if metadata:
            params.kv_overrides = ggml.overrides(metadata)
        self.placement = placement
        devices = ggml.device_list(*([placement.gpu_handle] if placement else []))
        params.devices = ggml.void_pointer(devices)
        if placement:
            params.n_gpu_layers, params.no_host = placement.layers.n_layers, True
            on_host = ggml.kept_on_host(placement.layers.host_patterns)
            params.tensor_buft_overrides = ggml.void_pointer(on_host)
        progress = ggml.LoadProgress(on_tensor) if on_tensor else None
        if progress:
            params.progress_callback = progress.callback
        self.handle: Any = None
        try:
            with ggml.log.listening(listen):
                self.handle = _load(paths, params)
            if progress:
                progress.raise_failure()
        except BaseException:  # what was heard or copied meanwhile failed: it is loaded, and nobody would free it
            self.close()
            raise
        if not self.handle:
            raise _refusal(self.path, lines.reason(), has_gpu=placement is not None)
        self.vocab, self.visitors = L.llama_model_get_vocab(self.handle), Visitors(self.path)
        self._spelling, self._splitting = Spelling(self.vocab), Splitting(self.handle, self.vocab)
        self.vocabulary: int = L.llama_vocab_n_tokens(self.vocab)
        self.bos_token, self.adds_bos = L.llama_vocab_bos(self.vocab), L.llama_vocab_get_add_bos(self.vocab)
        self.trained_context_tokens: int = L.llama_model_n_ctx_train(self.handle)
        self.sliding_window_tokens: int = L.llama_model_n_swa(self.handle)
        self.is_recurrent: bool = L.llama_model_is_recurrent(self.handle) or L.llama_model_is_hybrid(self.handle)
        self.has_encoder: bool = L.llama_model_has_encoder(self.handle)
        self.has_decoder: bool = L.llama_model_has_decoder(self.handle)
        self.embedding_width: int = L.llama_model_n_embd_out(self.handle)
        self.n_scores: int = L.llama_model_n_cls_out(self.handle)

    def metadata(self, key: str) -> str | None:
        """Return a metadata value as text, None when the file has none."""
        return ggml.model_metadata(self.handle, key)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the tokens of `text`; see `ggml.tokenize`. Raises ConfigError for what cannot be written in tokens."""
        return self._from_text(text, lambda: ggml.tokenize(self.vocab, text, add_special, parse_special))

    def count_tokens(self, text: str) -> int:
        """Return how many tokens `text` has, control tokens in it included. Raises ConfigError."""
        return self._from_text(text, lambda: ggml.count_tokens(self.vocab, text))

    def token_bytes(self, token: int, *, has_control: bool) -> bytes:
        """Return the bytes that `token` stands for; see `ggml.token_bytes`."""
        return self.visitors.visit(lambda: ggml.token_bytes(self.vocab, token, has_control))

    def _from_text(self, text: str, function: Callable[[], _Result]) -> _Result:
        """Return what `function` returns, which tokenizes `text`, on whatever thread and stack."""
        try:
            self.visitors.visit(lambda: self._spelling.check(text))
            return self._splitting.call(text, lambda: self.visitors.visit(function))
        except UnicodeEncodeError as error:  # as where a text was cut in two by who counts UTF-16, and sent as JSON
            half = f"U+{ord(error.object[error.start]):04X}"
            raise ConfigError(f"text: has half a character ({half}), which is none; leave it out") from error

    def can_write(self, text: str) -> str:
        """Return what the vocabulary can write of `text`."""
        missing = set(self._spelling.missing(text))
        return "".join(character for character in text if character not in missing)

    def close(self) -> None:
        """Free the model. Unmaps its weights, whatever memory lies there by now.

        Its contexts must be closed, and nobody may be reading of it (`visitors`).
        """
        if self.handle:
            L.llama_model_free(self.handle)
            self.handle = None


class LlamaContext:
    """A context: KV cache, compute buffers, logits. One thread at a time.

    All sizes are as llama.cpp reports them, 0 where it does not.

    kv_bytes: of keys, values and recurrent state in DRAM.
    cell_bytes: of keys and values, wherever they are.
    untouched_bytes: of kv_bytes, what takes no memory until it is written to.
    sparse_caches: where that is, (address, bytes).
    buffer_bytes: of the other buffers in DRAM, for computing and for logits.
    gpu_kv_bytes, gpu_buffer_bytes: the same on a GPU.
    caches: of each cache, wherever it is, its bytes and how many layers it has.
    rows: the logits of passes.
    cell_layers: of each cache of keys and values, its cells, those of one stream, and in how many layers it has them. A
        sliding window's has fewer cells than the context.
    """

    def __init__(
        self,
        model: LlamaModel,
        shape: ContextShape,
        callback: Any = None,
        *,
        may_copy_weights: bool = True,
        is_sparse: bool = False,
    ) -> None:
        """Make a context; `callback(address, is_asking, user_data)` is shown every node, for the context's whole life.

        may_copy_weights: to a GPU, for passes of many tokens, where the model's placement says so.
        is_sparse: caches take memory when they are written to, not before.
        Raises KernelError with llama.cpp's own reason when it refuses.
        """
        params = L.llama_context_default_params()
        width = shape.micro_batch_tokens
        # The batch has room for an output of each sequence: llama.cpp asserts it.
        params.n_ctx, params.n_batch, params.n_ubatch = shape.context_tokens, max(width, shape.sequences), width
        params.n_outputs_max, params.n_outputs_max_per_seq = shape.outputs_per_pass, 0
        params.n_seq_max, params.swa_full = shape.sequences, False
        if shape.rollback_tokens:
            params.n_rs_seq = shape.rollback_tokens
        params.kv_unified = shape.sequences > 1 and not shape.has_streams
        params.n_threads = params.n_threads_batch = shape.threads
        params.type_k, params.type_v = ggml.TYPE_IDS[shape.kv_type_k], ggml.TYPE_IDS[shape.kv_type_v]
        params.flash_attn_type = ggml.FLASH_ATTENTION[shape.flash_attention]
        if shape.pooling:
            params.embeddings, params.pooling_type = True, POOLING.index(shape.pooling) - 1
        placement = model.placement
        params.no_perf, params.offload_kqv = True, placement is not None
        params.op_offload = placement is not None and placement.copies_weights and may_copy_weights
        if callback is not None:
            self._callback, params.cb_eval = ggml.cast_callback(callback, params.cb_eval)
        lines = _Lines()
        is_telling = params.op_offload and callback is not None
        caches = CacheMemory()
        self.handle: Any = None
        self._pool: ggml.ThreadPool | None = None
        try:
            with (
                ggml.log.listening(lines.add),
                ggml.telling_splits() if is_telling else contextlib.nullcontext(),
                caches.watching() if is_sparse else contextlib.nullcontext(),
            ):
                self.handle = L.llama_init_from_model(model.handle, params)
            caches.settle(is_made=bool(self.handle))
        except BaseException:  # what was heard meanwhile failed: it is made, and nobody would free it
            self.close()
            raise
        if not self.handle:
            raise KernelError(
                f"{model.path}: llama.cpp cannot make a context of {shape.context_tokens:,} tokens: {lines.reason()}; "
                f"try other settings ({', '.join(map(option, ('context_tokens', 'kv_type', 'flash_attention')))}), or "
                "another copy of the file"
            )
        self._threads = shape.threads
        self.memory = L.llama_get_memory(self.handle)
        self.context_tokens: int = L.llama_n_ctx(self.handle)
        self.rollback_tokens: int = L.llama_n_rs_seq(self.handle) if shape.rollback_tokens else 0
        self.caches = [
            (int(float(size) * MIB), max(1, int(layers or 0)))
            for line in lines.lines
            for size, layers in _CACHE.findall(line)
        ]
        self.cell_bytes = sum(
            int(float(found[1]) * MIB)
            for line in lines.lines
            if line.startswith(_OF_CELLS) and (found := _CACHE.search(line))
        )
        self.cell_layers = lines.cell_layers()
        gpu = placement.gpu_name if placement else ""
        self.gpu_kv_bytes, _ = lines.sizes(_CACHE_PART, gpu)
        self.gpu_buffer_bytes, self.buffer_bytes = lines.sizes(_BUFFER, gpu)
        if self.buffer_bytes:  # reported is room for an output of each sequence; a pass that has more makes more
            size_of, most = (_outputs_bytes, width) if shape.pooling else (_logits_bytes, shape.outputs_per_pass)
            self.buffer_bytes += max(0, size_of(model, most) - size_of(model, shape.sequences))
        self.kv_bytes = sum(size for size, _ in self.caches) - self.gpu_kv_bytes
        self.untouched_bytes = min(caches.size_bytes, self.kv_bytes)
        self.sparse_caches: Sequence[tuple[int, int]] = caches.ranges
        self.rows = self._new_rows(shape, model.vocabulary, may_free=is_sparse and not ggml.check_library())

    def _new_rows(self, shape: ContextShape, vocabulary: int, *, may_free: bool) -> LogitRows:
        def address() -> int:
            return ggml.address_of(L.llama_get_logits(self.handle)) if may_free else 0

        rows = LogitRows(shape.outputs_per_pass, vocabulary, shape.sequences, address)
        rows.free()  # llama.cpp cleared its own, which took their memory
        return rows

    def stop_at(self, flag: ggml.StopFlag) -> None:
        """End passes, with code 2, while `flag` is up; it must live as long as this does."""
        flag.watch(self.handle)

    def use_threads(self, threads: int) -> None:
        """Compute with so many threads from now on."""
        L.llama_set_n_threads(self.handle, threads, threads)

    def keep_cores(self) -> None:
        """Compute with each thread on a core of its own, where there are as many threads as cores for this process.

        For passes in short stage visits: a kernel that wakes threads may leave two on one core for milliseconds each
        time.
        """
        cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
        if 1 < len(cores) == self._threads:
            with contextlib.suppress(NotSupported, OSError), _same_cores():
                os.sched_setaffinity(0, cores)  # where that is forbidden, llama.cpp would complain in each pass
                self._pool = ggml.ThreadPool(sorted(cores))
                self._pool.attach(self.handle)

    @property
    def ring_cells(self) -> int:
        """The fewest cells that a cache has for a sequence; 0 where llama.cpp does not say."""
        return min((n_cells for n_cells, _ in self.cell_layers), default=0)

    def decode(self, batch: PassBatch) -> int:
        """Run llama_decode, and return its code."""
        with _same_cores() if self._pool else contextlib.nullcontext():
            code = int(L.llama_decode(self.handle, batch.handle))
        if code in (DECODED, STOPPED, FAILED):
            self.rows.note_pass(batch.n_outputs)
        return code

    def close(self) -> None:
        """Free the context. Idempotent."""
        if self.handle:
            L.llama_free(self.handle)
            self.handle = None
        if self._pool:
            self._pool.close()


def _logits_bytes(model: LlamaModel, tokens: int) -> int:
    """Return what llama.cpp keeps of the logits of a pass in which so many tokens have some."""
    return 4 * tokens * model.vocabulary


def _outputs_bytes(model: LlamaModel, tokens: int) -> int:
    """Return what llama.cpp keeps of the outputs of a pass for embeddings, which it allocates at the first such pass.

    Room for logits is part of it, whether there are any or not.
    """
    return 4 * tokens * (model.vocabulary + model.embedding_width)


@contextlib.contextmanager
def _same_cores() -> Iterator[None]:
    """Leave the calling thread the cores that it had before this block: what it starts later inherits them."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # some were taken away meanwhile
            os.sched_setaffinity(0, before)

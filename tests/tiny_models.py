"""Makes tiny random GGUF models of more than a hundred architectures, each in a fraction of a second.

A test that claims "the streamed logits equal llama.cpp's" needs models to claim it of. `make_model` writes one: the
right tensors and metadata for its architecture, random weights, a few hundred meaningless tokens. Nobody hands us the
list of tensors that an architecture wants, so we ask llama.cpp: given metadata alone, `llama_model_init_from_user`
builds every tensor the architecture could have and calls back once for each. We note names and shapes, leave out the
optional ones that the recipe does not want, draw the weights with numpy and write the file with the `gguf` package.
The metadata in the file is the recipe's and nothing else.

Covers: dense, mixture, recurrent and hybrid language models; encoders; F16 matrices, or any type that llama.cpp
quantises to; files split into shards. Does not cover: diffusion, vision, sensible text. All models have llama.cpp's
tokenizer "test", which hashes every five bytes of text into one token and knows no end of text.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as low
import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray

from llama_tensors import Shape, catching_log, tensor_shapes, value_type
from recipes.dense import DENSE
from recipes.encoders import EMBEDDING
from recipes.mixtures import MIXTURES
from recipes.recipe import N_EXPERT_USED, Keys, Recipe, Value
from recipes.recurrent import HYBRID, RECURRENT

N_VOCAB = 384
N_CTX = 1024
NARROW = 128

ARCHITECTURES: dict[str, Recipe] = {
    recipe.name or recipe.architecture: recipe for recipe in (*DENSE, *MIXTURES, *RECURRENT, *HYBRID)
}
"""Every model there is, by name: the architecture's but for `llama-moe`, which is `llama` with experts."""

EMBEDDERS: dict[str, Recipe] = {recipe.name or recipe.architecture: recipe for recipe in EMBEDDING}
"""Models for embeddings: encoders, one that ranks, and decoders whose files name a pooling."""


def make_model(name: str, folder: Path, *, scale: int = 1, seed: int = 0, quantisation: str | None = None) -> Path:
    """Write `folder/name-scale-seed.gguf`, unless it exists, and return its path.

    The same arguments give the same bytes, so a model that was made before in the folder that the environment variable
    TINY_MODELS names is copied from there. The file appears whole or not at all. `quantisation` is a file type of
    llama.cpp ("Q8_0", "Q4_0", "Q4_K_M", "MXFP4_MOE"...): the F16 file is made first and the quantised one beside it,
    with the type after the seed.

    Raises RuntimeError when llama.cpp refuses the recipe or the quantisation, with what it logged.
    """
    path = folder / f"{name}-{scale}-{seed}.gguf"
    if quantisation is not None:
        path = path.with_name(f"{path.stem}-{quantisation}.gguf")
    store = os.environ.get("TINY_MODELS")
    if path.exists():
        return path
    if store and Path(store) != folder:
        made = make_model(name, Path(store), scale=scale, seed=seed, quantisation=quantisation)
        with _writing(path) as draft:
            shutil.copyfile(made, draft)
    elif quantisation is not None:
        _quantise(make_model(name, folder, scale=scale, seed=seed), path, quantisation)
    else:
        recipe = (ARCHITECTURES | EMBEDDERS)[name]
        metadata = _metadata(recipe, scale)
        shapes = _shapes(recipe, metadata)
        if recipe.n_nextn:
            metadata |= _append_nextn(recipe, shapes)
        with _writing(path) as draft:
            _write(draft, recipe.architecture, metadata, shapes, seed)
    return path


def make_trained_on(tokens: int, name: str, folder: Path) -> Path:
    """Write the model `name` as one that was trained on so many tokens: it has learned positions, if any, for these."""
    recipe = ARCHITECTURES[name]
    ARCHITECTURES[f"{name}-{tokens}"] = replace(recipe, metadata={**recipe.metadata, "context_length": tokens})
    return make_model(f"{name}-{tokens}", folder)


def make_narrow(name: str, folder: Path, tokens: int = N_CTX) -> Path:
    """Write the model `name`, trained on so many tokens, with narrow feed-forward layers.

    For tests of what attention and states keep: the other layers take most of the time that passes take.
    """
    recipe = ARCHITECTURES[name]
    n_ff = recipe.n_ff if isinstance(recipe.n_ff, tuple) else (recipe.n_ff,)
    narrow = tuple(min(width, NARROW) for width in n_ff)
    ARCHITECTURES[f"{name}-narrow"] = replace(recipe, n_ff=narrow if len(narrow) > 1 else narrow[0])
    return make_trained_on(tokens, f"{name}-narrow", folder)


def split_model(path: Path, parts: int, folder: Path) -> list[Path]:
    """Write the model at `path` again as `parts` shards in `folder`, cut by bytes and so within layers.

    Returns the shards in order; llama.cpp loads all of them from the first, which holds the metadata. The names end in
    `-00001-of-0000N.gguf`, as llama.cpp requires.

    Raises ValueError when there are fewer tensors than parts.
    """
    reader = GGUFReader(path)
    tensors = list(reader.tensors)
    if not 1 <= parts <= len(tensors):
        raise ValueError(f"cannot split the {len(tensors)} tensors of {path} into {parts} shards")
    ends = np.cumsum([int(tensor.n_bytes) for tensor in tensors])
    cuts = [0]
    for part in range(1, parts):
        cut = int(np.searchsorted(ends, ends[-1] * part // parts)) + 1
        cuts.append(min(max(cut, cuts[-1] + 1), len(tensors) - parts + part))
    cuts.append(len(tensors))

    shards = []
    for part in range(parts):
        shard = folder / f"{path.stem}-{part + 1:05d}-of-{parts:05d}.gguf"
        with _writing(shard) as draft:
            writer = GGUFWriter(draft, str(reader.fields["general.architecture"].contents()))
            if part == 0:
                _copy_metadata(reader, writer)
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(tensors))
            for tensor in tensors[cuts[part] : cuts[part + 1]]:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            _finish(writer)
        shards.append(shard)
    return shards


# Metadata


def _metadata(recipe: Recipe, scale: int) -> dict[str, Value]:
    """Every key of the file but `general.architecture`, which the writer adds."""
    width, depth = (1, scale) if recipe.is_deepened else (scale, 1)
    keys: dict[str, Value] = {
        "vocab_size": N_VOCAB,
        "context_length": N_CTX,
        "embedding_length": recipe.n_embd,
        "block_count": recipe.n_layer * depth,
        "feed_forward_length": _times(recipe.n_ff, width),
        "attention.head_count": recipe.n_head,
        "attention.head_count_kv": recipe.n_head_kv,
        # an architecture reads one of the two
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if recipe.n_expert:
        keys |= {"expert_count": recipe.n_expert, "expert_used_count": N_EXPERT_USED}
    if recipe.n_ff_expert:
        keys["expert_feed_forward_length"] = recipe.n_ff_expert * width
    keys |= recipe.metadata
    return {
        "general.name": "tiny random model",  # llama.cpp treats some names of models in their own way
        "general.file_type": int(low.LLAMA_FTYPE_MOSTLY_F16),
        **{key if key.startswith("xielu.") else f"{recipe.architecture}.{key}": value for key, value in keys.items()},
        "tokenizer.ggml.model": "test",
        "tokenizer.ggml.tokens": [f"tok_{token}" for token in range(N_VOCAB)],
        "tokenizer.ggml.scores": [0.0] * N_VOCAB,
        **({"tokenizer.ggml.token_type_count": 2} if "pooling_type" in recipe.metadata else {}),
    }


def _times(numbers: int | tuple[int, ...], factor: int) -> int | tuple[int, ...]:
    return numbers * factor if isinstance(numbers, int) else tuple(number * factor for number in numbers)


# Which tensors


def _shapes(recipe: Recipe, metadata: Keys) -> dict[str, Shape]:
    """Name and shape of every tensor that the file is to hold, in llama.cpp's order."""
    shapes: dict[str, Shape] = {}
    for name, shape in tensor_shapes({"general.architecture": recipe.architecture, **metadata}).items():
        if re.search(recipe.without, name) or (recipe.is_tied and name == "output.weight"):
            continue
        if "ffn_gate_up_exps" in name and not recipe.is_gate_up_fused:
            for half in ("ffn_gate_exps", "ffn_up_exps"):
                shapes[name.replace("ffn_gate_up_exps", half)] = (shape[0], shape[1] // 2, *shape[2:])
        else:
            shapes[name] = shape
    return shapes


def _append_nextn(recipe: Recipe, shapes: dict[str, Shape]) -> dict[str, Value]:
    """Add the blocks of multi-token prediction to `shapes`; the metadata that goes with them.

    Apart from the rest, as llama.cpp skips these blocks and so cannot be asked for their tensors.
    """
    last = f"blk.{recipe.n_layer - 1}."
    for block in range(recipe.n_layer, recipe.n_layer + recipe.n_nextn):
        like = {name.removeprefix(last): shape for name, shape in shapes.items() if name.startswith(last)}
        shapes |= {f"blk.{block}.{name}": shape for name, shape in like.items()}
        shapes[f"blk.{block}.nextn.eh_proj.weight"] = (2 * recipe.n_embd, recipe.n_embd)
        shapes |= {f"blk.{block}.nextn.{norm}.weight": (recipe.n_embd,) for norm in ("enorm", "hnorm")}
    return {
        f"{recipe.architecture}.block_count": recipe.n_layer + recipe.n_nextn,
        f"{recipe.architecture}.nextn_predict_layers": recipe.n_nextn,
    }


# Weights

_ALWAYS_F32 = re.compile(
    r"norm|conv1d|shortconv\.conv|ssm_a|time_mix_(first|lerp|[wavg][12]|decay_w)|ffn_gate_inp|altup_|hc_|_ape"
)


def _draw(name: str, shape: Shape, seed: int, *, is_tied: bool) -> NDArray[Any]:
    """Random values for the tensor `name`, of a size that keeps activations near 1; numpy order, F16 or F32."""
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values: NDArray[Any] = generator.standard_normal(shape[::-1], dtype=np.float32)
    if name.endswith("ssm_a"):
        values = -np.abs(values) - 0.1  # a state decays
    elif name.endswith("ssm_dt.bias"):
        values = 0.5 * values - 3  # before the softplus: short time steps, long memory
    elif name.endswith("bias"):
        values *= 0.05
    elif re.search(r"norm|time_mix_ln|ssm_d$", name):
        values = 1 + 0.1 * values
    elif "rope_f" in name:
        values = 1 + np.abs(values)  # divides a frequency
    elif name.startswith("token_embd"):
        values *= 0.02 if is_tied else 0.3  # tied and large, every token predicts itself
    else:
        values /= np.sqrt(shape[0])
    is_matrix = len(shape) > 1 and min(shape[:2]) >= 64
    return values.astype(np.float16 if is_matrix and not _ALWAYS_F32.search(name) else np.float32)


# Files


def _write(path: Path, architecture: str, metadata: Keys, shapes: Mapping[str, Shape], seed: int) -> None:
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, (bool, int, float, str)):
            writer.add_key_value(key, value, value_type(value))
        else:
            writer.add_key_value(key, list(value), GGUFValueType.ARRAY, value_type(value[0]))
    for name, shape in shapes.items():
        writer.add_tensor(name, _draw(name, shape, seed, is_tied="output.weight" not in shapes))
    _finish(writer)


def _copy_metadata(reader: GGUFReader, writer: GGUFWriter) -> None:
    for key, entry in reader.fields.items():
        if key == "general.architecture" or key.startswith("GGUF."):  # the writer's, and the reader's own
            continue
        element = entry.types[-1] if entry.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(key, entry.contents(), entry.types[0], element)


def _finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _quantise(source: Path, target: Path, quantisation: str) -> None:
    params = low.llama_model_quantize_default_params()
    params.ftype = getattr(low, f"LLAMA_FTYPE_MOSTLY_{quantisation}")
    with _writing(target) as draft, catching_log() as log:
        if low.llama_model_quantize(os.fsencode(source), os.fsencode(draft), ctypes.byref(params)) != 0:
            raise RuntimeError(f"llama.cpp did not quantise {source} to {quantisation}: {log}")


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it becomes `path` when the block ends well and goes when it does not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

"""The model that `inflate.py` grows: its tensors by layer, and what growing does to each of them.

Whatever growing would not leave unchanged is refused here, in one line: architectures, storage types and tensors that
have no rule, and layers that differ from each other.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from pathlib import Path

from edge_run.base.errors import NotSupported
from edge_run.tiers.gguf import read_gguf
from edge_run.tiers.gguf_format import TENSOR_TYPES, UINT32
from edge_run.tiers.gguf_header import Header, TensorInfo, read_header

SUPPORTED_ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe")  # a layer there does not depend on its number
SUPPORTED_TYPES = (  # llama.cpp quantises to them quickly, and without an importance matrix
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
LEAST_WIDTH_STEP = 32

_LAYER_TENSOR = re.compile(r"blk\.(\d{1,9})\.(.+)")


class Role(enum.Enum):
    """What happens to a layer's tensor when the model grows."""

    SHARED = "norms, biases and the router: an added layer has those of the trained layer after it"
    NOISE = "noise in an added layer"
    SILENT = "zeros in an added layer"
    ROWS = "wider by rows of noise; noise in an added layer"
    COLUMNS = "wider by columns of zeros; zeros in an added layer"


ROLES = {
    **dict.fromkeys(("attn_norm.weight", "attn_q_norm.weight", "attn_k_norm.weight", "ffn_norm.weight"), Role.SHARED),
    **dict.fromkeys(("attn_q.bias", "attn_k.bias", "attn_v.bias", "ffn_gate_inp.weight"), Role.SHARED),
    **dict.fromkeys(("attn_q.weight", "attn_k.weight", "attn_v.weight"), Role.NOISE),
    "attn_output.weight": Role.SILENT,
    **dict.fromkeys(("ffn_gate.weight", "ffn_up.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight"), Role.ROWS),
    **dict.fromkeys(("ffn_down.weight", "ffn_down_exps.weight"), Role.COLUMNS),
}


@dataclass(frozen=True, slots=True)
class InflateSource:
    """The model to grow.

    header: its header.
    raw_header: the file's bytes up to the header's end.
    architecture: its architecture.
    layers: the tensors of each layer, by their name within the layer.
    before: the tensors before the layers in the file.
    after: the tensors after the layers in the file.
    width: the neurons of every feed-forward network, or of every expert.
    width_keys: the metadata keys, without the architecture, that hold the width.
    """

    header: Header
    raw_header: bytes
    architecture: str
    layers: tuple[dict[str, TensorInfo], ...]
    before: tuple[TensorInfo, ...]
    after: tuple[TensorInfo, ...]
    width: int
    width_keys: tuple[str, ...]

    @property
    def width_step(self) -> int:
        """By how many neurons it can grow: whole blocks of every row as wide as they are many, K-quants' of 256."""
        blocks = (
            TENSOR_TYPES[tensor.type_id].block_elements
            for layer in self.layers
            for part, tensor in layer.items()
            if ROLES[part] is Role.COLUMNS
        )
        return max((LEAST_WIDTH_STEP, *blocks))


def read_source(path: Path) -> InflateSource:
    """Return the model in `path`; NotSupported when it cannot be grown, ModelFileError when it is broken."""
    model, header = read_gguf(path), read_header(path)
    if model.architecture not in SUPPORTED_ARCHITECTURES or len(model.shards) > 1:
        raise NotSupported(
            f"{path}: {model.architecture} in {len(model.shards)} file(s), one file of "
            f"{', '.join(SUPPORTED_ARCHITECTURES)} is needed; grow another model",
        )
    layers: dict[int, dict[str, TensorInfo]] = {}
    before: list[TensorInfo] = []
    after: list[TensorInfo] = []
    for tensor in model.tensors:
        if name := _LAYER_TENSOR.fullmatch(tensor.name):
            _check_part(path, tensor, name[2])
            layers.setdefault(int(name[1]), {})[name[2]] = tensor
        else:
            (after if layers else before).append(tensor)
    prefix = f"{model.architecture}."
    numbers = {entry.key.removeprefix(prefix): entry.value for entry in header.entries if entry.type_id == UINT32}
    if not layers or sorted(layers) != list(range(len(layers))) or numbers.get("block_count") != len(layers):
        raise NotSupported(
            f"{path}: has tensors of {len(layers)} layers, block_count is {numbers.get('block_count')}; grow another "
            "model",
            found=len(layers),
        )
    in_order = tuple(layers[number] for number in range(len(layers)))
    width = _width(path, in_order)
    width_keys = tuple(
        key for key in ("feed_forward_length", "expert_feed_forward_length") if numbers.get(key) == width
    )
    if not width_keys:
        raise NotSupported(
            f"{path}: its layers are {width:,} wide, its metadata does not say so; grow another model", found=width
        )
    with path.open("rb") as file:
        raw_header = file.read(header.shard.header_bytes)
    model.check_unchanged()  # so that all of this is of one file
    return InflateSource(
        header, raw_header, model.architecture, in_order, tuple(before), tuple(after), width, width_keys
    )


def _check_part(path: Path, tensor: TensorInfo, part: str) -> None:
    """Refuse a layer's tensor that we would not know how to grow."""
    role = ROLES.get(part)
    if role is None or (role in (Role.ROWS, Role.COLUMNS) and len(tensor.shape) not in (2, 3)) or 0 in tensor.shape:
        raise NotSupported(
            f"{path}: no rule for growing {tensor.name} of shape {tensor.shape}; grow another model",
        )
    kind = TENSOR_TYPES[tensor.type_id].name
    if role is not Role.SHARED and kind not in SUPPORTED_TYPES:
        raise NotSupported(
            f"{path}: {tensor.name} is {kind}, one of {', '.join(SUPPORTED_TYPES)} is needed; quantise the model with "
            "llama-quantize",
        )


def _width(path: Path, layers: tuple[dict[str, TensorInfo], ...]) -> int:
    """Return the neurons of every feed-forward network (of every expert); NotSupported when the layers differ."""
    widths = {
        tensor.shape[1] if ROLES[part] is Role.ROWS else tensor.shape[0]
        for layer in layers
        for part, tensor in layer.items()
        if ROLES[part] in (Role.ROWS, Role.COLUMNS)
    }
    if len(widths) != 1 or any(layer.keys() != layers[0].keys() for layer in layers):
        raise NotSupported(
            f"{path}: its {len(layers)} layers have different tensors or widths ({sorted(widths)}), equal layers are "
            "needed; grow another model",
        )
    return widths.pop()

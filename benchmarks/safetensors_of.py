"""Writes the weights of a Qwen2 GGUF in 16 bits (BF16) as safetensors, bit for bit, with a config.json beside them.

    safetensors_of.py MODEL-bf16.gguf FOLDER

For comparisons with programs that read no GGUF: `requantize.py --type BF16` gives the GGUF. Nothing is converted: what
GGUF has in BF16 or F32 lies in safetensors as it is.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from pathlib import Path
from typing import BinaryIO

from edge_run.tiers.gguf import GgufModel, read_gguf

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TYPES = {0: "F32", 30: "BF16"}  # by ggml's numbers
TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


def safetensors_name(name: str) -> str:
    """Return what transformers calls the tensor that a GGUF calls `name`."""
    if (match := TENSOR.fullmatch(name)) is None or match[2] not in NAMES:
        raise SystemExit(f"{name}: no tensor of Qwen2's that is known here")
    layer = f"model.layers.{match[1]}." if match[1] else ""
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def config_of(gguf: GgufModel) -> dict[str, object]:
    """Return what transformers needs to know of the model."""
    embeddings = next(tensor for tensor in gguf.tensors if tensor.name == "token_embd.weight")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": gguf.value("embedding_length"),
        "intermediate_size": gguf.value("feed_forward_length"),
        "num_hidden_layers": gguf.value("block_count"),
        "num_attention_heads": gguf.value("attention.head_count"),
        "num_key_value_heads": gguf.value("attention.head_count_kv"),
        "max_position_embeddings": gguf.value("context_length"),
        "rms_norm_eps": gguf.value("attention.layer_norm_rms_epsilon"),
        "rope_theta": gguf.value("rope.freq_base"),
        "vocab_size": embeddings.shape[1],
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in gguf.tensors),
        "torch_dtype": "bfloat16",
    }


def write_safetensors(source: Path, folder: Path) -> Path:
    """Write `model.safetensors` and `config.json` of `source` into `folder`; return the folder. The file is whole."""
    gguf = read_gguf(source)
    folder.mkdir(parents=True, exist_ok=True)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in gguf.tensors:
        if tensor.type_id not in TYPES:
            raise SystemExit(f"{source}: {tensor.name} is of type {tensor.type_id}; make BF16 of it (requantize.py)")
        header[safetensors_name(tensor.name)] = {
            "dtype": TYPES[tensor.type_id],
            "shape": list(reversed(tensor.shape)),
            "data_offsets": [place, place + tensor.size_bytes],
        }
        place += tensor.size_bytes
    text = json.dumps(header).encode()
    draft = folder / "model.safetensors.part"
    with draft.open("wb") as target:
        target.write(struct.pack("<Q", len(text)) + text)
        for tensor in gguf.tensors:
            with gguf.shards[tensor.shard].path.open("rb") as weights:
                weights.seek(tensor.offset)
                _copy(weights, target, tensor.size_bytes)
    gguf.check_unchanged()
    (folder / "config.json").write_text(json.dumps(config_of(gguf), indent=1))
    return draft.replace(folder / "model.safetensors").parent


def _copy(source: BinaryIO, target: BinaryIO, n_bytes: int, block: int = 1 << 24) -> None:
    while n_bytes:
        if not (part := source.read(min(block, n_bytes))):
            raise SystemExit(f"{source.name}: was cut while it was read")
        target.write(part)
        n_bytes -= len(part)


def main() -> None:
    """Write what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_safetensors(arguments.source, arguments.folder)


if __name__ == "__main__":
    main()

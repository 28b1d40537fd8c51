"""Writes a model of the first layers of another: what leaving it early would give, as a drafter of its own tokens.

    first_layers.py SOURCE.gguf TARGET.gguf LAYERS

Norm and output are those of the whole model, as early exits have them that were not trained (logit lens). It takes the
`gguf` package, which the tests need too.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from gguf import GGUFReader, GGUFWriter

LAYER = re.compile(r"blk\.(\d+)\.")


def write_first_layers(source: Path, target: Path, n_layers: int) -> Path:
    """Write the first `n_layers` of `source` to `target`; return `target`."""
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = n_layers if name == f"{architecture}.block_count" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        match = LAYER.match(tensor.name)
        if match is None or int(match[1]) < n_layers:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def main() -> None:
    """Write what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("layers", type=int)
    arguments = parser.parse_args()
    write_first_layers(arguments.source, arguments.target, arguments.layers)


if __name__ == "__main__":
    main()

"""The GBNF of a JSON schema. In a `Cell` the jobs of this module make it, as a schema is a stranger's program.

That process has no vocabulary, and no answer waits for it.
"""

from __future__ import annotations

import json
from typing import Any

from edge_run.base.errors import ConfigError
from edge_run.base.units import MIB
from edge_run.runtime.grammars.gbnf import NAME
from edge_run.runtime.processes.cell_child import allow_memory

JSON_SCHEMA = "JSON schema"
ALTERNATIVES = "edge-run:alternatives"
CONVERTING_BYTES = 64 * MIB


def load() -> bytes:
    """Import what `convert` needs, which takes longer than most schemas."""
    import edge_run.runtime.grammars.schema_converter  # noqa: F401

    return b""


def convert(schema: str) -> bytes:
    """Return `schema_grammar` in UTF-8. Raises ConfigError."""
    allow_memory(CONVERTING_BYTES)
    return schema_grammar(schema).encode("utf-8", "surrogatepass")


def schema_grammar(schema: str) -> str:
    """Return the GBNF grammar of a JSON schema.

    References to other documents are refused, never fetched. What a grammar cannot say is ignored, as llama.cpp
    ignores it: bounds of fractions, among others. What a schema cannot say is this: one of several texts, each with a
    schema of its own for the JSON behind it, `{ALTERNATIVES: [{"text": ..., "schema": {...}}]}`.
    """
    from edge_run.runtime.grammars.schema_converter import SchemaConverter

    try:
        value = json.loads(schema)
        if isinstance(value, dict) and ALTERNATIVES in value:
            return _alternatives(value[ALTERNATIVES])
        return SchemaConverter(value).grammar()
    except (ConfigError, MemoryError):
        raise
    except Exception as error:  # the converter indexes and calls its way through any JSON
        reason = " ".join(str(error)[:1000].split())[:200]
        raise ConfigError(f"JSON schema: {type(error).__name__}: {reason}") from error


def _alternatives(ways: list[dict[str, Any]]) -> str:
    """Return the grammar of one of several texts with JSON behind it: the rules of each have names of their own."""
    grammars = [schema_grammar(json.dumps(way["schema"])) for way in ways]
    rules = [_renamed(grammar, f"w{number}-") for number, grammar in enumerate(grammars)]
    starts = [f"{json.dumps(way['text'])} w{number}-root" for number, way in enumerate(ways)]
    return "\n".join([f"root ::= {' | '.join(starts)}", *rules])


def _renamed(grammar: str, prefix: str) -> str:
    return NAME.sub(lambda found: prefix + found[1] if found[1] else found[0], grammar)

"""JSON schemas as GBNF, by llama-cpp-python's converter. What that writes wrongly, or leaves out, is mended here."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from llama_cpp import llama_grammar

from edge_run.base.errors import ConfigError
from edge_run.runtime.grammars.json_pattern import json_pattern

Schema = Mapping[str, Any]
MOST_SCHEMAS = 20_000  # that one consists of, which takes less than half a second
_ROOT = "#"
_HAVE_PRECEDENCE = frozenset(("$ref", "anyOf", "oneOf"))  # the converter looks at nothing beside them
_OF_VALUES = frozenset(("const", "enum"))
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties"))
_OF_TEXTS_AND_LISTS = frozenset(
    ("items", "prefixItems", "minItems", "maxItems", "pattern", "format", "minLength", "maxLength")
)
_BEYOND_OBJECTS = _OF_VALUES | _OF_TEXTS_AND_LISTS | {"allOf"}
_WORDS = _HAVE_PRECEDENCE | _OF_OBJECTS | _BEYOND_OBJECTS


class SchemaConverter(llama_grammar.SchemaConverter):
    """Converts one schema. Raises ConfigError, and anything: llama-cpp-python's converter asserts and indexes."""

    def __init__(self, schema: Any) -> None:
        super().__init__(prop_order={}, allow_fetch=False, dotall=False, raw_pattern=False)
        self._schema = schema
        self._rule_of_ref = {_ROOT: "root"}
        self._n_read = 0

    def grammar(self) -> str:
        """Return the grammar."""
        super().visit(self._in_plain_words(self._schema), "")
        return self.format_grammar()

    def visit(self, schema: Any, name: str) -> str:
        """Return the name of a rule for `schema`, which is added as `name` where no other has that name."""
        return super().visit(self._in_plain_words(schema), name or "-")  # the root alone has no name

    def _format_literal(self, literal: str) -> str:
        """Return the GBNF of JSON text. What JSON escapes stays escaped, and all else is as it is."""
        text = json.dumps(json.loads(literal), ensure_ascii=False)
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    def _visit_pattern(self, pattern: str, name: str) -> str:
        """Return the rule of JSON texts that fit a regular expression."""
        if not (pattern.startswith("^") and pattern.endswith("$")):
            raise ConfigError(f"JSON schema: pattern {pattern[:80]!r}: must begin with ^ and end with $")
        return super()._visit_pattern(f"^{json_pattern(pattern[1:-1])}$", name)

    def _resolve_ref(self, ref: str) -> str:
        """Return the rule of what a reference leads to: one of its own, whatever else is called so."""
        if ref in self._rule_of_ref:
            return self._rule_of_ref[ref]
        name = self._rule_of_ref[ref] = self._free_name(ref.rpartition("/")[2])  # known to references from within
        made = self.visit(self._target(ref), name)
        if made != name and name in self._rules:  # something within was called so
            raise ConfigError(f"JSON schema: $ref {ref[:80]!r}: a property has the name of the definition; rename it")
        self._rule_of_ref[ref] = made
        return made

    def _free_name(self, wanted: str) -> str:
        plain = llama_grammar.INVALID_RULE_CHARS_RE.sub("-", wanted) or "-"
        names = itertools.chain([plain], (f"{plain}{number}" for number in itertools.count()))
        return next(name for name in names if not self._is_taken(name))

    def _is_taken(self, name: str) -> bool:
        is_built_in = name in llama_grammar.RESERVED_NAMES
        return is_built_in or name in self._rules or name in self._rule_of_ref.values()

    def _target(self, ref: str) -> Any:
        """Return what a reference leads to. Raises ConfigError for what is not in this schema."""
        root, *path = ref.split("/")
        if root != _ROOT:
            raise ConfigError(f"JSON schema: $ref {ref[:80]!r}: must begin with #/, nothing is looked up elsewhere")
        found = self._schema
        for part in path:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(key)] if isinstance(found, list) else found[key]
            except (LookupError, TypeError, ValueError):
                raise ConfigError(f"JSON schema: $ref {ref[:80]!r}: leads nowhere, there is no {key[:80]!r}") from None
        return found

    def _in_plain_words(self, schema: Any) -> Schema:
        """Return a schema that says the same without what the converter leaves out: a list of types, and `allOf`."""
        self._n_read += 1
        if self._n_read > MOST_SCHEMAS:
            raise ConfigError(
                f"JSON schema: consists of more than {MOST_SCHEMAS:,} schemas, each counted wherever allOf refers to "
                "it; simplify it"
            )
        if not _HAVE_PRECEDENCE.isdisjoint(_checked(schema)):
            return schema
        if isinstance(types := schema.get("type"), list):
            rest = {key: value for key, value in schema.items() if key != "type"}
            if not _OF_VALUES.isdisjoint(rest):
                return rest
            return {"anyOf": [{"type": one} if one == "null" else {**rest, "type": one} for one in types]}
        return self._merged(schema) if "allOf" in schema and _OF_VALUES.isdisjoint(schema) else schema

    def _merged(self, schema: Schema) -> Schema:
        """Return a schema that itself says what the parts of its `allOf` say, as far as a grammar can say it."""
        own = {key: value for key, value in schema.items() if key != "allOf"}
        parts = [part for part in map(_checked, schema["allOf"]) if _says_something(part)]
        is_object = own.get("type", "object") == "object"
        if not is_object or not parts or (len(parts) == 1 and own.keys().isdisjoint(("properties", "required"))):
            for part in parts:
                own |= part
            return self._in_plain_words(own)
        properties: dict[str, Any] = {}
        required = list(own.get("required", ()))
        for part in parts:
            of_part, required_of_part = self._properties(part)
            properties |= of_part
            required += required_of_part
        properties |= own.get("properties", {})
        return {**own, "required": required, **({"properties": properties} if properties else {})}

    def _properties(self, part: Any) -> tuple[Schema, Sequence[str]]:
        """Return the properties of a part of an `allOf`, and which must be there.

        As llama.cpp has it: all of them, and of several alternatives none. Raises ConfigError where it is no object.
        """
        part = self._in_plain_words(part)
        if "$ref" in part:
            return self._properties(self._target(part["$ref"]))
        if part.get("type", "object") != "object" or not _BEYOND_OBJECTS.isdisjoint(part):
            raise ConfigError("JSON schema: allOf: not all of it are objects with properties; say it without allOf")
        properties = part.get("properties", {})
        ways = [self._properties(way)[0] for word in ("anyOf", "oneOf") for way in part.get(word, ())]
        of_ways = {name: value for way in ways for name, value in way.items()}
        return {**of_ways, **properties}, [*properties, *part.get("required", ())]


def _checked(schema: Any) -> dict[str, Any]:
    """Return `schema`, if it is one. Raises ConfigError."""
    if not isinstance(schema, dict):
        raise ConfigError(f"JSON schema: must be an object, as each schema in it; {str(schema)[:80]!r} is none")
    return schema


def _says_something(part: Schema) -> bool:
    """Return whether a grammar can say anything of what a part of an `allOf` says."""
    return part.get("type", "object") != "object" or not _WORDS.isdisjoint(part)

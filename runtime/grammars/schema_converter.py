"""JSON schemas as GBNF: what llama.cpp's converter makes of them, which its library does not have."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from edge_run.base.errors import ConfigError
from edge_run.runtime.grammars.gbnf import FORMATS, PRIMITIVES, SPACE, literal, other_names, repeated, whole_numbers
from edge_run.runtime.grammars.json_pattern import json_pattern

Schema = Mapping[str, Any]
MOST_SCHEMAS = 20_000  # that one consists of, which takes less than half a second
MOST_LABEL_LETTERS = 60  # of a rule's name: the last ones of where its schema is
_ROOT = "#"
_COMMA = '"," space'
_INVALID = re.compile(r"[^a-zA-Z0-9-]+")  # in the names of rules
_HAVE_PRECEDENCE = frozenset(("$ref", "anyOf", "oneOf"))  # nothing beside them counts
_OF_VALUES = frozenset(("const", "enum"))
_OF_OBJECTS = frozenset(("properties", "required", "additionalProperties"))
_OF_TEXTS = frozenset(("pattern", "minLength", "maxLength"))
_OF_LISTS = frozenset(("items", "prefixItems", "minItems", "maxItems"))
_BEYOND_OBJECTS = _OF_VALUES | _OF_TEXTS | _OF_LISTS | {"format", "allOf"}
_TIGHTER = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems"), max),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems"), min),
}
_WORDS = _HAVE_PRECEDENCE | _OF_OBJECTS | _BEYOND_OBJECTS


class SchemaConverter:
    """Converts one schema. A class, because a schema is read where the rules are that it needs, and refers to itself.

    Raises ConfigError, and anything: it indexes and calls its way through any JSON.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._bodies = {"root": "", "space": SPACE}  # of rules, by their names
        self._names: dict[str, str] = {}  # of rules, by their bodies
        self._wanted: Counter[str] = Counter()  # how often each name was
        self._rule_of_ref = {_ROOT: "root"}
        self._n_read = 0

    def grammar(self) -> str:
        """Return the grammar."""
        self._bodies["root"] = self._body(self._schema, "")
        return "\n".join(f"{name} ::= {body}" for name, body in self._bodies.items())

    def _rule(self, schema: Any, name: str) -> str:
        """Return the name of the rule of `schema`: of a new one, which is to be called `name`, where there is none."""
        body = self._body(schema, name)
        return body if body in self._bodies else self._added(name, body)

    def _added(self, name: str, body: str) -> str:
        if body not in self._names:
            name = self._free_name(name)
            self._names[body], self._bodies[name] = name, body
        return self._names[body]

    def _free_name(self, wanted: str) -> str:
        plain = _INVALID.sub("-", wanted[-MOST_LABEL_LETTERS:])
        plain = plain if plain[:1].isalpha() else f"r{plain}"
        name = plain
        while name in self._bodies or name in PRIMITIVES:
            name = f"{plain}{self._wanted[plain]}"
            self._wanted[plain] += 1
        return name

    def _primitive(self, name: str) -> str:
        if name not in self._bodies:
            self._bodies[name], needed = PRIMITIVES[name]
            for one in needed:
                self._primitive(one)
        return name

    def _body(self, schema: Any, name: str) -> str:
        """Return what the rule of `schema` consists of. As with llama.cpp, what comes first here counts."""
        schema = self._in_plain_words(schema)
        if "$ref" in schema:
            return self._referred(schema["$ref"])
        for word in ("oneOf", "anyOf"):
            if word in schema:
                ways = [self._rule(one, f"{name}-{number}") for number, one in enumerate(schema[word])]
                return _alternatives(ways, word)
        if "const" in schema:
            return literal(schema["const"])
        if "enum" in schema:
            return _alternatives(list(map(literal, schema["enum"])), "enum")
        return self._of_type(schema, name)

    def _of_type(self, schema: Schema, name: str) -> str:
        kind = _kind(schema)
        if kind == "object":
            return self._object(schema, name)
        if kind == "array":
            return self._array(schema, name)
        if kind == "string":
            return self._string(schema, name)
        if kind == "integer" and (bounds := _whole_bounds(schema)) != (None, None):
            return whole_numbers(*bounds)
        if kind not in ("integer", "number", "boolean", "null", "value"):
            raise ConfigError(f"JSON schema: type {str(kind)[:80]!r}: there is no such type")
        return self._primitive(kind)

    def _object(self, schema: Schema, name: str) -> str:
        properties = _checked(schema.get("properties", {}))
        more = schema.get("additionalProperties", "properties" not in schema)
        if more is True and not properties:
            return self._primitive("object")
        pairs = {}
        for key, value in properties.items():
            rule = self._rule(value, f"{name}-{key}")
            pairs[key] = self._added(f"{name}-{key}-kv", f'{literal(key)} space ":" space {rule}')
        required = set(schema.get("required", ()))
        ways, rest = [], ""  # how it may begin where nothing must be there, and what may follow
        if more is not False:
            value = self._primitive("value") if more is True else self._rule(more, f"{name}-additional-value")
            key = self._primitive("string")
            key = self._added(f"{name}-additional-k", other_names(properties)) if properties else key
            pair = self._added(f"{name}-additional-kv", f'{key} ":" space {value}')
            rest = self._added(f"{name}-rest", f"( {_COMMA} {pair} )*")
            ways.append(f"{pair} {rest}")
        for key in reversed([key for key in properties if key not in required]):
            ways.append(f"{pairs[key]} {rest}")
            rest = self._added(f"{name}-{key}-rest", f"( {_COMMA} {pairs[key]} )? {rest}")
        first = f" {_COMMA} ".join(pairs[key] for key in properties if key in required)
        inner = f"{first} {rest}" if first else f"( {' | '.join(reversed(ways))} )?" if ways else ""
        return f'"{{" space {inner} space "}}"' if inner else '"{" space "}"'

    def _array(self, schema: Schema, name: str) -> str:
        items = schema.get("items", schema.get("prefixItems", {}))
        if isinstance(items, list):
            inner = f" {_COMMA} ".join(self._rule(one, f"{name}-tuple-{number}") for number, one in enumerate(items))
        else:
            inner = repeated(self._rule(items, f"{name}-item"), *_counts(schema, "Items"), separator=_COMMA)
        return f'"[" space {inner} space "]"' if inner else '"[" space "]"'

    def _string(self, schema: Schema, name: str) -> str:
        form = schema.get("format")
        if "pattern" in schema:
            pattern = schema["pattern"]
            if not (pattern.startswith("^") and pattern.endswith("$")):
                raise ConfigError(f"JSON schema: pattern {pattern[:80]!r}: must begin with ^ and end with $")
            return rf'"\"" {json_pattern(pattern[1:-1], lambda body: self._added(name, body))} "\""'
        if isinstance(form, str) and form in FORMATS:
            return self._primitive(FORMATS[form])
        if (counts := _counts(schema, "Length")) != (0, None):
            return rf'"\"" {repeated(self._primitive("char"), *counts)} "\""'
        return self._primitive("string")

    def _referred(self, ref: str) -> str:
        """Return the rule of what a reference leads to: one of its own, whatever else is called so."""
        if ref not in self._rule_of_ref:
            name = self._rule_of_ref[ref] = self._free_name(ref.rpartition("/")[2])
            self._bodies[name] = ""  # known to references from within
            self._bodies[name] = self._body(self._target(ref), name)
        return self._rule_of_ref[ref]

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
        """Return a schema that says the same without a list of types, and without `allOf`."""
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
        is_object = own.get("type", "object") == "object"
        parts = [part for part in map(_checked, schema["allOf"]) if not is_object or _says_something(part)]
        if not is_object or not parts or (len(parts) == 1 and own.keys().isdisjoint(("properties", "required"))):
            for part in parts:
                own = _both(own, part)
            return self._in_plain_words(own or {"type": "object"})
        properties: dict[str, Any] = {}
        required = list(own.get("required", ()))
        for part in parts:
            of_part, required_of_part = self._properties(part)
            properties |= of_part
            required += required_of_part
        properties |= own.get("properties", {})
        return {**own, "type": "object", "required": required, **({"properties": properties} if properties else {})}

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


def _both(one: Schema, other: Schema) -> dict[str, Any]:
    """Return what says both, as far as it can: of two bounds the tighter one, of two enums what they share."""
    both = {**one, **other}
    for word, tighter in _TIGHTER.items():
        if all(type(schema.get(word)) in (int, float) for schema in (one, other)):
            both[word] = tighter(one[word], other[word])
    if all(isinstance(schema.get("enum"), list) for schema in (one, other)):
        both["enum"] = [value for value in one["enum"] if value in other["enum"]]
    return both


def _says_something(part: Schema) -> bool:
    """Return whether a grammar can say anything of what a part of an `allOf` says."""
    return part.get("type", "object") != "object" or not _WORDS.isdisjoint(part)


def _kind(schema: Schema) -> Any:
    """Return the type of a schema, or the one that its words are of; `value` where it may be any."""
    if schema.get("type") is not None:
        return schema["type"]
    if "properties" in schema or schema.get("additionalProperties", True) is not True:
        return "object"
    if "items" in schema or "prefixItems" in schema:
        return "array"
    is_text = not _OF_TEXTS.isdisjoint(schema) or schema.get("format") in [*FORMATS]
    return "string" if is_text else "value"


def _alternatives(ways: list[str], word: str) -> str:
    if not ways:
        raise ConfigError(f"JSON schema: {word}: is empty, so that there is nothing to say")
    return " | ".join(ways)


def _counts(schema: Schema, of: str) -> tuple[int, int | None]:
    """Return how many there are of something, at least and at most. Raises ConfigError."""
    counts = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    if not all(isinstance(one, int) and one >= 0 for one in counts if one is not None) or counts[0] is None:
        raise ConfigError(f"JSON schema: min{of} and max{of}: must be whole numbers, 0 or more")
    return counts


def _whole_bounds(schema: Schema) -> tuple[float | None, float | None]:
    """Return between which numbers an integer is, both included; None where there is no bound."""
    bounds: list[float | None] = []
    for word, step, whole, tighter in (("Minimum", 1, math.floor, max), ("Maximum", -1, math.ceil, min)):
        plain, beyond = schema.get(word.lower()), schema.get(f"exclusive{word}")
        if isinstance(beyond, bool):  # as it once was: whether the other one is meant so
            plain, beyond = (None, plain) if beyond else (plain, None)
        given = [plain] if plain is not None else []
        given += [whole(beyond) + step] if beyond is not None else []
        bounds.append(tighter(given) if given else None)
    return bounds[0], bounds[1]

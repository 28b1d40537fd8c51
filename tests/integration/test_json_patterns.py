"""Regular expressions of JSON schemas: what texts they fit, whichever way JSON writes these."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_run.base.errors import ConfigError
from edge_run.runtime.grammars.schema_grammar import schema_grammar
from json_grammars import Takes, written

PATTERNS = [
    r".*",
    r"[^,]+",
    r"\d{5}",
    r"(\+1)?\d{2,3}-\d+",
    r"[^@\s]+@[\w.-]+\.[a-z]{2,}",
    r"a|b\.",
    r"(?:ab)+?c",
    r'"[^"]*"',
    r"[A-Z]:\\\w+",
    r"[!-~]*",
    r"\W\D\S",
    r"[\]^\-]+",
    r"[\n\t ]?x{0,2}",
    r"\x41\u00e9[\u{1F600}-\u{1F64F}]",
    r"[^\w]{2}",
    r"x\**",
]
LIKELY = st.lists(
    st.sampled_from(["a", "b", "c", "x", "A", "0", "12", "345", ".", ",", "-", "+1", "@", '"', "\\", "]", "^", "*"])
    | st.sampled_from([" ", "\n", "\t", "é", "😀", ":", "ab", "C:\\"]),
    max_size=7,
).map("".join)
FITTING = [
    "12345",
    "+112-3",
    "a@b-c.de",
    "b.",
    "ababc",
    '""',
    '"x"',
    "C:\\x1",
    "~!",
    "--x",
    "]-^",
    "\nxx",
    "Aé😀",
    "@@",
    "x**",
]


def test_patterns_are_of_texts_and_not_of_how_json_writes_them(takes: Takes) -> None:
    """By Python's own expressions, which mean the same here but for a form of code and one of search."""

    @given(st.sampled_from(PATTERNS), LIKELY | st.sampled_from(FITTING))
    @settings(max_examples=400)
    def check(pattern: str, text: str) -> None:
        of_python = re.sub(r"\\u\{(\w+)\}", lambda found: chr(int(found[1], 16)), pattern)
        fits = re.fullmatch(of_python, text, re.ASCII) is not None
        assert takes({"type": "string", "pattern": f"^{pattern}$"}, written(text)) == fits

    check()


def test_each_pattern_fits_something(takes: Takes) -> None:
    for pattern in PATTERNS:
        texts = [*FITTING, "", "x", "é,", "\n\n", "a", ". a"]
        assert any(takes({"type": "string", "pattern": f"^{pattern}$"}, written(text)) for text in texts), pattern


def test_white_space_is_that_of_any_language(takes: Takes) -> None:
    for letter in "\u1680\u2003\u202f\u205f\u3000":
        assert takes({"type": "string", "pattern": r"^\s$"}, f'"{letter}"')
        for pattern in (r"^\S$", r"^[^\s]$"):
            assert not takes({"type": "string", "pattern": pattern}, f'"{letter}"')


@pytest.mark.parametrize(
    "pattern",
    [
        "a",
        "^a",
        r"^\bx$",
        "^(?=a)b$",
        r"^(a)\1$",
        "^[b-a]$",
        r"^[+-\d]$",
        r"^[ -\d]$",
        "^[$",
        "^a\\$",
        "^*a$",
        "^[^\\s\\S]$",
        "^(a$",
        "^a)$",
        "^a{3,2}$",
    ],
)
def test_patterns_that_no_grammar_can_say_are_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="JSON schema"):
        schema_grammar(json.dumps({"type": "string", "pattern": pattern}))

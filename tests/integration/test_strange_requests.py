"""Grammars, schemas, penalties and prompts that strangers ask for take no memory, no time and no process of ours."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from edge_run import BudgetError, ConfigError, ContextFull, Model, NotSupported
from edge_run.base.sampling_config import SamplingConfig
from edge_run.base.units import MIB
from edge_run.devices.host.memory import process_memory
from edge_run.runtime.generation.request import Request
from edge_run.runtime.generation.sampling import Sampler
from edge_run.runtime.grammars import room as room_module
from edge_run.runtime.grammars.grammar import LocalGrammar, grammar_text
from edge_run.runtime.grammars.room import GrammarRoom, RoomedGrammar
from edge_run.runtime.llama.prompt_text import CLEARLY, PIECE_CHARACTERS, USUAL_CHARACTERS, tokenize_prompt
from json_grammars import opener
from kit_models import KIT
from tight_limits import growing_less_than, quick

DOUBLING = 'root ::= "a" root "y" | "a" root "z" | "b"'  # each "a" doubles the stacks
FREE = "root ::= [ -~]*"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(
        KIT, memory=process_memory().resident_bytes + 110 * MIB, cache_folder=tmp_path_factory.mktemp("cache")
    ) as opened:
        yield opened


def accept_all(sampler: Sampler, tokens: list[int]) -> None:
    for token in tokens:
        sampler.accept(token)


NESTED_RULES = ["root ::= r0", *(f'r{i} ::= r{i + 1} "y" | r{i + 1} "z"' for i in range(40)), 'r40 ::= "b"']
CHAIN = ["root ::= r0", *(f"r{i} ::= r{i + 1}" for i in range(100_000)), 'r100000 ::= "b"']
MOST = r"1,000,000,000 of something: at most 2,000 can be asked for; simplify it"
TOO_MUCH = r"takes more than|takes longer than|ends the process"


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", '{"type": "array", "items": {"type": "null"}, "minItems": 1000000000}', MOST),
        ("json_schema", '{"type": "string", "minLength": 1000000000}', MOST),
        ("json_schema", '{"type": "string", "pattern": "^a{1000000000}$"}', MOST),
        ("json_schema", '{"items": ' * 20_000 + "{}" + "}" * 20_000, "RecursionError"),
        ("grammar", "root ::= " + "(" * 200_000 + '"a"' + ")" * 200_000, "ends the process"),
        ("grammar", 'root ::= "a"{1000000}', "repetitions exceeds"),
        ("grammar", "\n".join(CHAIN), TOO_MUCH),
        ("grammar", "\n".join(NESTED_RULES), TOO_MUCH),
    ],
    ids=["items", "length", "pattern", "nested schema", "parentheses", "repetition", "chain", "doubling"],
)
def test_a_grammar_that_cannot_be_read(
    model: Model, kind: str, text: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reason != TOO_MUCH:  # what is wrong is found at once, but for a busy machine
        monkeypatch.setattr(room_module, "READING_S", 60.0)
    assert model.generate("Once", max_tokens=2, grammar=FREE).result().completion_tokens == 2
    with growing_less_than(400 << 20), quick(), pytest.raises(ConfigError, match=reason) as caught:
        model.generate("x", max_tokens=2, **{kind: text})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert model.generate("Once", max_tokens=2, grammar=FREE).result().completion_tokens == 2


def test_a_grammar_that_explodes_while_tokens_are_chosen(model: Model) -> None:
    (a,) = model.tokenize("a", add_special=False)
    vocab, n_vocab, config = model._vocab, model._opened.model.vocabulary, SamplingConfig(grammar=DOUBLING)
    with (
        growing_less_than(400 << 20),
        GrammarRoom(KIT) as room,
        Sampler(vocab, config, n_vocab, open_grammar=lambda one: room.open(*grammar_text(one), n_vocab)) as sampler,
        quick(),
        pytest.raises(NotSupported, match=r"grammar: the next token of the answer (takes|ends)"),
    ):
        accept_all(sampler, [a] * 60)


def test_grammars_that_are_open_at_once_have_one_bound(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that finds no room must wait until another one ends, and those that are open go on as before."""
    monkeypatch.setattr(room_module, "READING_S", 60.0)  # large ones take their time on a busy machine
    letters = "".join(chr(0x4E00 + 2 * number) for number in range(400))
    large, n_vocab = f'root ::= "a"* [{letters}]{{2000}} "x"', model._opened.model.vocabulary
    (a,) = model.tokenize("a", add_special=False)
    with growing_less_than(300 << 20), GrammarRoom(KIT) as room:
        small = room.open("grammar", FREE, n_vocab)
        opened = list[RoomedGrammar]()
        with pytest.raises(BudgetError, match="grammar: the grammars that are open leave no room"):
            opened.extend(room.open("grammar", large, n_vocab) for _ in range(40))
        assert 2 <= len(opened) < 15
        assert small.fits(a)
        assert opened[0].fits(a)
        assert room._cell.n_started == 1
        for grammar in opened[1:]:
            grammar.close()
        again = room.open("grammar", large, n_vocab)
        assert again.fits(a)
        room._cell.close()  # as one that takes too much would have it
        assert opened[0].fits(a)
        assert again.fits(a)


def test_an_answer_that_waits_has_no_window_for_penalties(model: Model) -> None:
    config = SamplingConfig(repeat_last_n=2**18, repeat_penalty=1.1)
    before = process_memory().resident_bytes
    samplers = [Sampler(model._vocab, config, model._opened.model.vocabulary, table=model._table) for _ in range(100)]
    assert process_memory().resident_bytes - before < 20 * MIB
    for sampler in samplers:
        sampler.close()
    (tokens,) = [tuple(model.tokenize("One day"))]
    answers = [model.begin(Request(tokens, 9, config)) for _ in range(100)]
    for answer in answers:
        answer.begin()
    assert process_memory().resident_bytes - before < 20 * MIB, "none looks further back than its text is long"
    assert all(answer.prompt is tokens for answer in answers)
    for answer in answers:
        answer.close()


@pytest.mark.parametrize("many", [2**28, 2**32 + 1, 2**62])
def test_penalties_that_look_far_back_take_no_memory(model: Model, many: int) -> None:
    n_vocab = model._opened.model.vocabulary
    config = SamplingConfig(top_k=many, repeat_last_n=many, repeat_penalty=1.5, seed=1, temperature=0.01)
    logits = np.zeros(n_vocab, np.float32)
    logits[[5, 6]] = 2.0, 1.9
    with growing_less_than(64 << 20), Sampler(model._vocab, config, n_vocab) as sampler:
        sampler.prime([5, *range(7, 200)])
        assert sampler.choose(logits) == 6
    logits[6] = 2.0
    with Sampler(model._vocab, config, n_vocab) as sampler:
        assert {sampler.choose(logits) for _ in range(20)} == {5, 6}, "of all tokens, not only of the best"


def test_a_schema_that_takes_long_holds_up_no_answer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its expression has many groups. Of an answer, several steps begin and end while it is read."""
    slow, n_vocab = json.dumps({"pattern": f"^{'(a|b)' * 60_000}$"}), model._opened.model.vocabulary
    reading, n_beside = threading.Event(), 0
    with GrammarRoom(KIT) as room, ThreadPoolExecutor(1) as other:
        plain, ask = room.open("JSON schema", "{}", n_vocab), room._converter.ask

        def ask_briefly(job: str, limit_s: float, **fields: Any) -> bytes:
            if job != "convert":
                return ask(job, limit_s, **fields)
            reading.set()
            try:
                return ask(job, 0.5, **fields)
            finally:
                reading.clear()

        monkeypatch.setattr(room._converter, "ask", ask_briefly)
        opening = other.submit(room.open, "JSON schema", slow, n_vocab)
        while not opening.done():
            was_reading = reading.is_set()
            plain.refused()
            n_beside += was_reading and reading.is_set()
        with pytest.raises(ConfigError, match=r"^JSON schema: reading it takes longer than 0.5 s; simplify it$"):
            opening.result()
    assert n_beside > 2


def test_a_grammar_gives_the_same_in_a_room_and_here(model: Model) -> None:
    schema = '{"type": "array", "items": {"enum": ["red", 22, null]}, "maxItems": 4}'
    vocab, n_vocab = model._vocab, model._opened.model.vocabulary
    noise = np.random.default_rng(3)
    config = SamplingConfig(json_schema=schema, seed=5, temperature=1.5)
    with (
        GrammarRoom(KIT) as room,
        Sampler(vocab, config, n_vocab, open_grammar=opener(vocab, n_vocab)) as here,
        Sampler(vocab, config, n_vocab, open_grammar=lambda one: room.open(*grammar_text(one), n_vocab)) as there,
    ):
        for _ in range(20):
            logits = noise.normal(0, 4, n_vocab).astype(np.float32)
            token = here.choose(logits)
            assert there.choose(logits) == token
            here.accept(token)
            there.accept(token)
            with pytest.raises(ConfigError, match="cannot come next"):
                there.accept(model.tokenize("x", add_special=False)[-1])


def test_an_open_grammar_keeps_no_table_of_the_vocabulary(model: Model) -> None:
    n_vocab = model._opened.model.vocabulary
    tracemalloc.start()
    try:
        grammars = [LocalGrammar(model._vocab, n_vocab, FREE) for _ in range(20)]
        assert all(grammar.refused().any() for grammar in grammars)
        held_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    for grammar in grammars:
        grammar.close()
    assert held_bytes < 10 * n_vocab, "for 20 of them"


def test_mutated_grammars_are_taken_or_refused(model: Model) -> None:
    chance = random.Random(7)
    words = ["root ::= ", '"a"', "[^x-", "]", "(", ")", "{9", ",3}", *"*+?|!.b", "\\x4", "\n", "b ::= ", "<[3]>"]
    n_vocab, taken = model._opened.model.vocabulary, 0
    with GrammarRoom(KIT) as room:
        for _ in range(300):
            text = 'root ::= "a" b* [a-z]{2,3} | (b | "x")+\nb ::= "y" | <[5]> !<[6]> .\n'
            for _ in range(chance.randrange(1, 4)):
                at = chance.randrange(len(text))
                text = text[:at] + chance.choice(words) + text[at + chance.randrange(3) :]
            with contextlib.suppress(ConfigError, NotSupported):
                assert room.open("grammar", text, n_vocab).refused().shape == (n_vocab,)
                taken += 1
    assert 10 < taken < 290


def test_a_prompt_that_is_far_too_long_is_not_tokenized(model: Model) -> None:
    text = "word salad " * 5_000_000
    with growing_less_than(300 << 20):
        began_s = time.process_time()
        with pytest.raises(ContextFull, match=r"prompt of 52 MiB: its first 64 KiB are .* the context holds"):
            model.generate(text)
        assert time.process_time() - began_s < 5


def test_a_long_prompt_that_is_not_clearly_too_long_is_tokenized_as_a_whole(model: Model) -> None:
    """It has more letters than usual tokens have, and not clearly too many tokens, as they are long."""
    text, room_tokens = " extraordinary" * 4700, 2500
    assert len(text) > max(PIECE_CHARACTERS, CLEARLY * USUAL_CHARACTERS * room_tokens)
    tokens = tokenize_prompt(model._opened.model, text, room_tokens)
    assert tokens == list(model.tokenize(text, parse_special=True))
    assert room_tokens < len(tokens) <= CLEARLY * room_tokens
    with pytest.raises(ContextFull, match=r"its first 64 KiB are [\d,]+ tokens already"):
        model.generate(" " * 200_000, max_tokens=1)

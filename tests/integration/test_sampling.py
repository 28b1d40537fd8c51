"""Sampler: llama.cpp's samplers on a real model and on rows of logits whose distribution is known."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run.base.errors import ConfigError, KernelError, LogitsError, NotSupported
from edge_run.base.protocols import Logits
from edge_run.base.sampling_config import SamplingConfig
from edge_run.runtime.generation.sampling import Sampler
from edge_run.runtime.grammars.schema_grammar import ALTERNATIVES
from edge_run.runtime.llama import _ggml as ggml
from json_grammars import opener

MODEL = Path(__file__).parents[2] / "src" / "edge_run" / "models" / "kit-dense-q4_0.gguf"
PROMPT = "It was a dark and stormy night, and"
UNFILTERED, GREEDY = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"temperature": 0.0}


@dataclass
class Engine:
    """llama.cpp itself, one sequence: what the sampler gets its logits from."""

    model: Any
    context: Any
    vocab: Any
    n_vocab: int

    def begin(self, text: str = PROMPT) -> tuple[list[int], Logits]:
        tokens = ggml.tokenize(self.vocab, text, True, False)
        ggml.L.llama_memory_clear(ggml.L.llama_get_memory(self.context), True)
        return tokens, self.decode(tokens)

    def decode(self, tokens: Sequence[int]) -> Logits:
        ids = (ggml.L.llama_token * len(tokens))(*tokens)  # the batch only points to them
        assert ggml.L.llama_decode(self.context, ggml.L.llama_batch_get_one(ids, len(tokens))) == 0
        return np.ctypeslib.as_array(ggml.L.llama_get_logits_ith(self.context, -1), (self.n_vocab,)).copy()

    def generate(self, sampler: Sampler, max_tokens: int) -> list[int]:
        """The tokens of an answer, without the one that ends it."""
        prompt, logits = self.begin()
        sampler.prime(prompt)
        answer: list[int] = []
        while len(answer) < max_tokens:
            token = sampler.choose(logits)
            sampler.accept(token)
            if ggml.L.llama_vocab_is_eog(self.vocab, token):
                break
            answer.append(token)
            logits = self.decode([token])
        return answer

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(ggml.token_bytes(self.vocab, token, False) for token in tokens).decode()

    def sampler(self, **settings: Any) -> Sampler:
        return Sampler(self.vocab, SamplingConfig(**settings), self.n_vocab, None, opener(self.vocab, self.n_vocab))

    def row(self, *logits: float) -> Logits:
        """A row in which only the first tokens are possible."""
        row = np.full(self.n_vocab, -np.inf, np.float32)
        row[: len(logits)] = logits
        return row


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    ggml.L.llama_backend_init()
    model_params = ggml.L.llama_model_default_params()
    model_params.use_extra_bufts = False  # as runs do; and kernels with AMX end the process on some virtual machines
    model = ggml.L.llama_model_load_from_file(os.fsencode(MODEL), model_params)
    assert model, f"llama.cpp cannot load {MODEL}"
    params = ggml.L.llama_context_default_params()
    params.n_ctx, params.n_threads, params.n_threads_batch = 512, 2, 2
    context = ggml.L.llama_init_from_model(model, params)
    vocab = ggml.L.llama_model_get_vocab(model)
    yield Engine(model, context, vocab, ggml.L.llama_vocab_n_tokens(vocab))
    ggml.L.llama_free(context)
    ggml.L.llama_model_free(model)


# Settings


def test_greedy_is_the_argmax_at_every_step(engine: Engine) -> None:
    with engine.sampler(**GREEDY) as sampler:
        _, logits = engine.begin()
        for _ in range(20):
            before = logits.copy()
            token = sampler.choose(logits)
            assert token == int(np.argmax(before))
            assert np.array_equal(logits, before)
            sampler.accept(token)
            logits = engine.decode([token])


def test_greedy_takes_the_lowest_of_equals(engine: Engine) -> None:
    with engine.sampler(**GREEDY) as sampler:
        assert sampler.choose(engine.row(1.0, 2.0, 2.0, 2.0)) == 1


@pytest.mark.parametrize("options", [{"top_k": 1, "temperature": 1.5}, {"temperature": 1e-40}])
def test_top_1_and_a_temperature_of_next_to_nothing_are_greedy(engine: Engine, options: dict[str, float]) -> None:
    with engine.sampler(**GREEDY) as greedy, engine.sampler(**options) as other:
        assert engine.generate(greedy, 24) == engine.generate(other, 24)


def test_a_seed_repeats_its_answer_and_another_does_not(engine: Engine) -> None:
    answers = []
    for seed in (7, 7, 8):
        with engine.sampler(seed=seed, temperature=1.0) as sampler:
            assert sampler.seed == seed
            answers.append(engine.generate(sampler, 24))
    assert answers[0] == answers[1] != answers[2]


def test_a_drawn_seed_is_reported_and_repeats_its_answer(engine: Engine) -> None:
    with engine.sampler(temperature=1.0) as drawn, engine.sampler(temperature=1.0) as other:
        assert drawn.seed != other.seed
        answer = engine.generate(drawn, 24)
        seed = drawn.seed
    with engine.sampler(temperature=1.0, seed=seed) as again:
        assert engine.generate(again, 24) == answer


def test_a_seed_gives_the_same_answer_again(engine: Engine) -> None:
    with engine.sampler(seed=3, repeat_penalty=1.3) as one, engine.sampler(seed=3, repeat_penalty=1.3) as other:
        assert engine.generate(one, 24) == engine.generate(other, 24)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_5000_draws_follow_the_softmax(engine: Engine, temperature: float) -> None:
    values = np.array([3.0, 2.5, 2.0, 0.0, -1.0, 2.9])
    share = np.exp(values / temperature)
    share /= share.sum()
    row = engine.row(*values)
    with engine.sampler(temperature=temperature, seed=1, **UNFILTERED) as sampler:
        draws = np.bincount([sampler.choose(row) for _ in range(5000)], minlength=len(values))
    assert len(draws) == len(values)
    noise = np.sqrt(5000 * share * (1 - share))
    assert np.all(np.abs(draws - 5000 * share) < 4.5 * noise + 1)


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.7}, {0, 1}),
        ({"min_p": 0.3}, {0, 1, 2}),
        # The shares are 0.5, 0.25, 0.15, 0.1; were temperature first, it would level them and all four would stay.
        ({"min_p": 0.45, "temperature": 10.0}, {0, 1}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
    ],
)
def test_filters_keep_what_they_should_and_come_before_temperature(
    engine: Engine, settings: dict[str, float], possible: set[int]
) -> None:
    row = engine.row(*np.log([0.5, 0.25, 0.15, 0.1]))
    with engine.sampler(**{"temperature": 1.0, "seed": 5, **UNFILTERED, **settings}) as sampler:
        assert {sampler.choose(row) for _ in range(300)} == possible


def test_suppressed_tokens_are_never_chosen(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "suppressed_tokens", lambda vocab: [0, 2])
    with engine.sampler(**GREEDY) as sampler:
        assert sampler.choose(engine.row(3.0, 2.0, 2.5)) == 1


# Penalties


def test_repeat_penalty_counts_the_prompt_within_its_window(engine: Engine) -> None:
    row = engine.row(2.0, 1.9, 1.8)
    with engine.sampler(**GREEDY, repeat_penalty=1.5, repeat_last_n=3) as sampler:
        sampler.prime([0, 5, 6, 7])
        assert sampler.choose(row) == 0
        sampler.accept(0)
        assert sampler.choose(row) == 1
    with engine.sampler(**GREEDY, repeat_penalty=1.5, repeat_last_n=3) as fresh:
        assert fresh.choose(row) == 0


def test_repeat_penalty_changes_the_answer(engine: Engine) -> None:
    with engine.sampler(**GREEDY) as plain, engine.sampler(**GREEDY, repeat_penalty=1.5) as penalised:
        answer, other = engine.generate(plain, 60), engine.generate(penalised, 60)
    assert answer != other
    assert len(set(answer)) < len(set(other))


def test_the_whole_context_as_window_needs_its_length(engine: Engine) -> None:
    config = SamplingConfig(temperature=0, repeat_penalty=1.5, repeat_last_n=-1)
    with Sampler(engine.vocab, config, engine.n_vocab, context_tokens=100) as sampler:
        sampler.prime([0, *range(5, 95)])
        assert sampler.choose(engine.row(2.0, 1.9)) == 1
    with pytest.raises(ConfigError, match="give a number"):
        Sampler(engine.vocab, config, engine.n_vocab)


def test_frequency_and_presence_penalties_count_what_was_there(engine: Engine) -> None:
    row = engine.row(2.0, 1.5, 1.1)
    for settings, before, wanted in [
        ({}, [0, 0, 0], 0),
        ({"presence_penalty": 0.4}, [0, 0, 0], 0),
        ({"presence_penalty": 0.6}, [0, 0, 0], 1),
        ({"frequency_penalty": 0.2}, [0, 0], 0),
        ({"frequency_penalty": 0.2}, [0, 0, 0], 1),
        ({"frequency_penalty": 0.35, "presence_penalty": 0.1}, [0, 0, 0, 1], 2),
        ({"presence_penalty": -5.0, "repeat_last_n": 1}, [0, 1], 1),
    ]:
        with engine.sampler(**{**GREEDY, "repeat_last_n": 10, **settings}) as sampler:
            sampler.prime(before)
            assert sampler.choose(row) == wanted, settings


def test_biases_move_bans_and_force_tokens(engine: Engine) -> None:
    row = engine.row(2.0, 1.5, 1.1)
    for bias, wanted in [({1: 0.4}, 0), ({1: 0.6}, 1), ({0: -math.inf}, 1), ({2: 100.0, 0: -1.0}, 2)]:
        with engine.sampler(**GREEDY, logit_bias=bias) as sampler:
            assert sampler.choose(row) == wanted
    with pytest.raises(ConfigError, match="outside the vocabulary"):
        engine.sampler(logit_bias={engine.n_vocab: 1.0})
    for bias in ({1: math.nan}, {1: math.inf}, {1: -1e39}, {"1": 1.0}, {1: None}):
        with pytest.raises(ConfigError, match="logit bias"):
            SamplingConfig(logit_bias=bias)  # type: ignore[arg-type]


def test_logprobs_are_of_the_model_whatever_was_chosen(engine: Engine) -> None:
    values = np.array([2.0, 1.0, 3.0, -1.0])
    row = engine.row(*values)
    wanted = values - np.log(np.exp(row.astype(np.float64)).sum())
    with engine.sampler(temperature=0.3, logit_bias={2: -50.0}, top_logprobs=3) as sampler:
        assert sampler.choose(row) != 2
        found = sampler.logprobs(row, 1)
    assert found is not None
    assert [token for token, _ in found] == [1, 2, 0, 1]
    assert [value for _, value in found] == pytest.approx([wanted[1], wanted[2], wanted[0], wanted[1]])
    with engine.sampler(top_logprobs=0) as sampler:
        assert sampler.logprobs(row, 0) == ((0, pytest.approx(wanted[0])),)
    with engine.sampler() as sampler:
        assert sampler.logprobs(row, 0) is None


# Grammars


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_forces_the_answer(engine: Engine, temperature: float) -> None:
    for seed in range(5):
        answers = []
        for _ in range(2):
            with engine.sampler(grammar='root ::= "yes" | "no"', temperature=temperature, seed=seed) as sampler:
                answers.append(engine.generate(sampler, 10))
        assert engine.text(answers[0]) in {"yes", "no"}
        assert answers[0] == answers[1]


def test_a_grammar_leaves_alone_what_it_allows(engine: Engine) -> None:
    with engine.sampler(seed=4) as free, engine.sampler(seed=4, grammar="root ::= [^\\x00]*") as bound:
        assert engine.generate(free, 24) == engine.generate(bound, 24)


def test_a_json_schema_gives_valid_json(engine: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "colour": {"enum": ["red", "green"]},
            "ages": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 3},
            "is_new": {"type": "boolean"},
        },
        "required": ["name", "colour", "ages", "is_new"],
        "additionalProperties": False,
    }
    for seed in range(3):
        with engine.sampler(json_schema=json.dumps(schema), seed=seed, temperature=1.2) as sampler:
            value = json.loads(engine.text(engine.generate(sampler, 300)))
        assert list(value) == ["name", "colour", "ages", "is_new"]
        assert len(value["name"]) <= 12
        assert value["colour"] in {"red", "green"}
        assert len(value["ages"]) <= 3
        assert set(value["ages"]) <= {1, 22}
        assert isinstance(value["is_new"], bool)


def test_one_of_several_texts_with_json_of_its_own_behind_it(engine: Engine) -> None:
    ways = [{"text": f"{name}[ARGS]", "schema": {"enum": [name, 22]}} for name in ("red", "green")]
    for seed in range(3):
        with engine.sampler(json_schema=json.dumps({ALTERNATIVES: ways}), seed=seed, temperature=1.2) as sampler:
            name, mark, rest = engine.text(engine.generate(sampler, 60)).partition("[ARGS]")
        assert (name in ("red", "green"), mark) == (True, "[ARGS]")
        assert json.loads(rest) in (name, 22)


def test_a_json_string_holds_no_raw_control_character(engine: Engine) -> None:
    quote, newline, letter = (ggml.tokenize(engine.vocab, text, False, False)[0] for text in ('"', "\n", "a"))
    with engine.sampler(json_schema='{"type": "string"}') as sampler:
        sampler.accept(quote)
        with pytest.raises(ConfigError, match="cannot come next"):
            sampler.accept(newline)
        sampler.accept(letter)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("nonsense", "expecting ::= at the end"),
        ('root ::= "a"\nroot is "b"', 'expecting ::= at is "b"'),
        ('root ::= "yes" |\n  no-such-rule', "no-such-rule"),
        ('answer ::= "yes"', "root"),
        ('root ::= root "x" | "y"', "recursion|not begin a rule with itself"),
        ('root ::= "\\x00" \0', "zero character"),
        ("root ::= [" + "a" * 1000, "unexpected end of input"),
        ('root ::= "\ud800"', "UTF-8"),
    ],
)
def test_an_impossible_grammar_is_one_clear_line(
    engine: Engine, grammar: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    capfd.readouterr()
    with pytest.raises(ConfigError, match=reason) as caught:
        engine.sampler(grammar=grammar)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
    assert "error parsing grammar" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "schema",
    [
        "{",
        "[]",
        '{"type": "no-such-type"}',
        '{"$ref": "https://example.com/schema.json"}',
        '{"$ref": "#/nowhere"}',
        '{"type": "string", "pattern": "no-anchors"}',
    ],
)
def test_an_impossible_json_schema_is_one_clear_line(engine: Engine, schema: str) -> None:
    with pytest.raises(ConfigError, match=r"^JSON schema: ") as caught:
        engine.sampler(json_schema=schema)
    assert "\n" not in str(caught.value)


def test_standard_error_stays_where_it_was(engine: Engine, capfd: pytest.CaptureFixture[str]) -> None:
    engine.sampler(grammar='root ::= "x"').close()
    with pytest.raises(ConfigError):
        engine.sampler(grammar="nonsense")
    capfd.readouterr()
    os.write(2, b"still here")
    assert capfd.readouterr().err == "still here"


def test_accepting_against_the_grammar_is_refused_and_changes_nothing(engine: Engine) -> None:
    (wrong,) = ggml.tokenize(engine.vocab, "q", False, False)
    with engine.sampler(grammar='root ::= "yes"', **GREEDY) as sampler:
        for token in (wrong, ggml.L.llama_vocab_eos(engine.vocab)):
            with pytest.raises(ConfigError, match="cannot come next in the grammar"):
                sampler.accept(token)
        assert engine.text(engine.generate(sampler, 10)) == "yes"


def test_a_grammar_that_no_token_can_continue(engine: Engine) -> None:
    with engine.sampler(grammar='root ::= "\\x00"') as sampler, pytest.raises(NotSupported, match="loosen the grammar"):
        sampler.choose(engine.begin()[1])


# Misuse


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_damaged_logits_are_refused(engine: Engine, bad: float) -> None:
    with engine.sampler() as sampler, pytest.raises(LogitsError, match="damaged"):
        sampler.choose(engine.row(1.0, bad, 2.0))


def test_logits_of_another_vocabulary_are_refused(engine: Engine) -> None:
    with engine.sampler() as sampler, pytest.raises(KernelError, match="shape"):
        sampler.choose(np.zeros(3, np.float32))


@pytest.mark.parametrize("token", [-1, 10**9])
def test_tokens_outside_the_vocabulary_are_refused(engine: Engine, token: int) -> None:
    with engine.sampler() as sampler, pytest.raises(ConfigError, match="must be 0 to"):
        sampler.accept(token)


def test_a_closed_sampler_refuses_to_work(engine: Engine) -> None:
    (sampler := engine.sampler(grammar='root ::= "x"')).close()
    sampler.close()
    with pytest.raises(ConfigError, match="closed"):
        sampler.choose(engine.row(1.0))

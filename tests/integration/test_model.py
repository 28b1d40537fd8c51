"""`Model` as a program uses it, on the bundled model, resident and streamed."""

from __future__ import annotations

import gc
import json
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_run import Cancelled, ConfigError, ContextFull, EdgeRunError, Model, NotSupported, Request, Turn, to_json
from in_child import in_child
from kit_models import streamed

PROMPT = "Once upon a time, in a small town by the sea, there was"
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module", params=["resident", "streamed", "llama.cpp"])
def model(request: pytest.FixtureRequest, kit: Path, grown: Path) -> Iterator[Model]:
    """The model in each of its three modes; the grown one computes what the bundled one does."""
    options = {"resident": {"threads": 1, "context_tokens": 256}, "streamed": streamed()}.get(
        request.param, {"threads": 1, "context_tokens": 256, "backend": "llama.cpp"}
    )
    with Model(grown if request.param == "streamed" else kit, **options) as model:
        assert model.plan.mode == request.param
        yield model


@pytest.fixture(scope="module")
def greedy_text(kit: Path) -> str:
    with Model(kit, threads=1, context_tokens=256, backend="llama.cpp") as model:
        return model.generate(PROMPT, max_tokens=16, temperature=0).result().text


def test_pieces_join_to_the_text_and_the_last_one_carries_the_figures(model: Model) -> None:
    pieces = list(model.generate(PROMPT, max_tokens=12, temperature=0))
    generation = pieces[-1].generation
    assert generation is not None
    assert all(piece.generation is None for piece in pieces[:-1])
    assert "".join(piece.text for piece in pieces) == generation.text
    assert generation.completion_tokens == len(generation.token_ids) == 12
    assert generation.finish_reason == "length"
    assert generation.ttft_s > 0
    assert generation.decode_tokens_per_s > 0
    assert generation.memory.peak_bytes > 0
    assert json.loads(to_json(generation))["plan"]["mode"] == model.plan.mode


def test_the_stop_string_that_ended_an_answer_is_told_of_also_behind_control_tokens(model: Model) -> None:
    (mark,) = model.tokenize("<|bos|>", add_special=False, parse_special=True)
    options = {"max_tokens": 5, "temperature": 0, "logit_bias": {mark: 100.0}, "marks": ("<|bos|>",)}
    found = model.generate(PROMPT, stop=("never", "bos|><|bos", "bos|><"), **options).result()
    assert (found.text, found.finish_reason, found.stop_text) == ("<|", "stop", "bos|><|bos")
    assert model.generate(PROMPT, **options).result().stop_text == ""


def test_greedy_text_is_the_same_in_every_mode(model: Model, greedy_text: str) -> None:
    text = model.generate(PROMPT, max_tokens=16, temperature=0).result().text
    assert text == model.generate(PROMPT, max_tokens=16, temperature=0).result().text
    assert text == greedy_text


def test_a_prompt_that_goes_on_reuses_what_is_cached(model: Model) -> None:
    first = model.generate(PROMPT, max_tokens=8, temperature=0).result()
    longer = PROMPT + first.text
    again = model.generate(longer, max_tokens=8, temperature=0).result()
    assert again.cached_tokens >= first.prompt_tokens
    model.generate("Something else", max_tokens=1).result()
    fresh = model.generate(longer, max_tokens=8, temperature=0).result()
    assert fresh.cached_tokens < again.cached_tokens
    assert fresh.text == again.text


def test_seeds(model: Model) -> None:
    one, two = (model.generate(PROMPT, max_tokens=10, seed=7).result() for _ in range(2))
    assert one.token_ids == two.token_ids
    assert one.seed == 7
    drawn = model.generate(PROMPT, max_tokens=10).result()
    assert model.generate(PROMPT, max_tokens=10, seed=drawn.seed).result().token_ids == drawn.token_ids


def test_stop_string_ends_before_it(model: Model) -> None:
    whole = model.generate(PROMPT, max_tokens=16, temperature=0).result().text
    stop = whole[6:10]
    cut = model.generate(PROMPT, max_tokens=16, temperature=0, stop=stop).result()
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"


def test_grammar_and_schema(model: Model) -> None:
    answer = model.generate("Is it?", max_tokens=8, grammar='root ::= "yes" | "no"').result()
    assert answer.text in ("yes", "no")
    assert answer.finish_reason == "stop"
    schema = json.dumps({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]})
    assert "ok" in json.loads(model.generate("{", max_tokens=40, json_schema=schema, temperature=0).result().text)
    with pytest.raises(ConfigError, match="grammar"):
        model.generate("x", grammar="root ::= (").result()


def test_an_answer_as_a_whole_is_that_of_a_stream(model: Model, greedy_text: str) -> None:
    assert model.complete(PROMPT, max_tokens=16, temperature=0).text == greedy_text
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    assert "ok" in json.loads(model.complete("{", max_tokens=40, json_schema=schema, temperature=0).text)


def test_an_answer_may_take_so_many_seconds(model: Model, greedy_text: str) -> None:
    late = model.complete(PROMPT, max_tokens=16, temperature=0, deadline_s=1e-9)
    assert (late.text, late.finish_reason) == ("", "deadline")
    assert model.complete(PROMPT, max_tokens=16, temperature=0, deadline_s=600).text == greedy_text


def test_what_is_shown_of_a_model_and_a_stream(model: Model) -> None:
    assert repr(model) == f"<Model {str(model.path)!r}>"
    stream = model.generate(PROMPT, max_tokens=2, temperature=0)
    assert repr(stream) == "<Stream: 0 tokens, not finished>"
    stream.result()
    assert repr(stream) == "<Stream: 2 tokens, length>"


def test_limits(model: Model) -> None:
    assert model.generate(PROMPT, max_tokens=0).result().token_ids == ()
    with pytest.raises(ContextFull, match="256"):
        model.generate([5] * 256)
    full = model.generate([5] * 250, temperature=0.8, seed=1).result()
    assert full.finish_reason in ("context", "stop")
    assert full.prompt_tokens + full.completion_tokens <= 257
    assert model.generate(PROMPT, max_tokens=3).result().completion_tokens <= 3


@pytest.mark.parametrize(
    ("prompt", "options", "why"),
    [
        ([], {}, "prompt: is empty"),
        ([-1], {}, "token -1 is outside the vocabulary"),
        ([10**6], {}, "token 1000000 is outside the vocabulary"),
        (b"Once", {}, "prompt b'Once': must be text"),
        (None, {}, "prompt None: must be text"),
        ({5, 6}, {}, "must be text, a list of tokens"),
        ([5, "x"], {}, "'x' is no token"),
        ([5, True], {}, "True is no token"),
        ([{"role": "user", "content": "Hi"}], {}, "give it to chat"),
        ("x", {"max_tokens": -2}, "max tokens -2: must be"),
        ("x", {"max_tokens": "5"}, "max tokens '5': must be"),
        ("x", {"marks": 5}, "marks 5: must be a list"),
        ("x", {"drops_oldest": True}, "drops oldest: leaves out turns"),
        ("x", {"deadline_s": 0}, "deadline 0: must be more than 0"),
        ("x", {"temperature": -1}, "temperature -1: must be"),
        ("x", {"unknown": 1}, "option 'unknown': unknown"),
    ],
)
def test_what_cannot_be_is_refused_at_once(model: Model, prompt: object, options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        model.generate(prompt, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 10**6])
def test_a_token_outside_the_vocabulary_has_no_text(model: Model, token: int) -> None:
    """llama.cpp would end the process over it."""
    with pytest.raises(ConfigError, match="outside the vocabulary of 4096"):
        model.detokenize([5, token])
    assert model.detokenize(np.array([5, 6])) == model.detokenize(iter([5, 6])) == model.detokenize([5, 6]) != ""  # type: ignore[arg-type]


def test_a_new_stream_ends_the_one_before(model: Model) -> None:
    first = model.generate(PROMPT, max_tokens=30, temperature=0)
    next(first)
    second = model.generate(PROMPT, max_tokens=5, temperature=0).result()
    for ask in (lambda: next(first), first.result):
        with pytest.raises(Cancelled, match="another answer"):
            ask()
    assert second.completion_tokens == 5
    whole = model.generate(PROMPT, max_tokens=5, temperature=0)
    assert whole.result() == whole.generation
    model.generate(PROMPT, max_tokens=5, temperature=0).result()
    assert list(whole) == []


def test_cancel_from_another_thread(model: Model) -> None:
    stream = model.generate(PROMPT, temperature=0)
    next(stream)
    threading.Timer(0.05, model.cancel).start()
    started = time.monotonic()
    generation = stream.result()
    assert generation.finish_reason in ("cancelled", "context")
    assert time.monotonic() - started < 20
    assert model.generate(PROMPT, max_tokens=4, temperature=0).result().finish_reason == "length"


def test_tokens_may_be_an_array(model: Model) -> None:
    wanted = model.generate([5, 6, 7], max_tokens=3, temperature=0).result().token_ids
    assert model.generate(np.array([5, 6, 7]), max_tokens=3, temperature=0).result().token_ids == wanted  # type: ignore[arg-type]


@pytest.mark.parametrize("messages", ["Hi", [1, 2, 3], {"role": "user", "content": "Hi"}, [{"role": "user"}, "Hi"], 5])
def test_what_is_no_conversation_is_refused(model: Model, messages: Any) -> None:
    """Text was continued as it is, without the template."""
    with pytest.raises(ConfigError, match='"role"'):
        model.chat(messages)


def test_chat_needs_a_template(model: Model) -> None:
    assert not model.has_chat_template
    with pytest.raises(NotSupported, match="chat template"):
        model.chat([{"role": "user", "content": "Hi"}])


def test_a_chat_that_is_too_long_loses_its_oldest_turns_only_when_asked(kit: Path) -> None:
    system, last = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Who is there?"}
    long = [{"role": "user", "content": "A fox. " * 60}, {"role": "assistant", "content": "Yes."}]
    with Model(kit, chat_template=CHATML, context_tokens=256, threads=1) as model:
        whole = model.chat([system, last], max_tokens=4, temperature=0, drops_oldest=True)
        with pytest.raises(ContextFull):
            model.chat([system, *long, *long, last], max_tokens=4)
        short = model.chat([system, *long, *long, last], max_tokens=4, temperature=0, drops_oldest=True)
    assert (whole.dropped_messages, short.dropped_messages) == (0, 4)
    assert whole.token_ids == short.token_ids


def test_chat_with_a_template(kit: Path) -> None:
    with Model(kit, chat_template=CHATML, context_tokens=256, threads=1) as model:
        messages = [{"role": "user", "content": "Hello"}]
        answer = model.chat(messages, max_tokens=6, temperature=0)
        rendered = model.tokenize("<|user|>Hello\n<|assistant|>", parse_special=True)
        assert answer.prompt_tokens == len(rendered)
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        assert model.chat(parts, max_tokens=6, temperature=0).token_ids == answer.token_ids
        messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": "And then?"}]
        assert model.chat(messages, max_tokens=4, temperature=0).cached_tokens > 0


def test_closing_twice_and_using_after(kit: Path) -> None:
    model = Model(kit, context_tokens=128, threads=1)
    stream = model.generate(PROMPT, max_tokens=5)
    model.close()
    model.close()
    with pytest.raises(ConfigError, match="closed"):
        list(stream)
    with pytest.raises(EdgeRunError, match="closed"):
        model.generate(PROMPT)
    with pytest.raises(EdgeRunError, match="closed"):
        model.generate([1, 2, 3])
    with pytest.raises(EdgeRunError, match="closed"):
        model.tokenize(PROMPT)
    with pytest.raises(EdgeRunError, match="closed"):
        model.detokenize([1, 2])
    with pytest.raises(ConfigError, match="closed"), model:
        pass
    model.cancel()
    assert model.stats.generations == 0


def test_two_models_at_once(kit: Path, grown: Path) -> None:
    with Model(kit, context_tokens=128, threads=1) as one, Model(grown, **streamed()) as two:
        texts = {m.generate(PROMPT, max_tokens=10, temperature=0).result().text for m in (one, two, one)}
    assert len(texts) == 1


def test_opening_and_closing_leaves_nothing(grown: Path) -> None:
    def counts() -> tuple[set[threading.Thread], int, int]:
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("\n")
        return {*threading.enumerate()}, len(list(Path("/proc/self/fd").iterdir())), maps

    def once() -> None:
        with Model(grown, **streamed()) as model:
            model.generate(PROMPT, max_tokens=2).result()

    once()
    threads, descriptors, maps = counts()
    for _ in range(8):
        once()
    now = counts()  # what tests before this one left may have ended meanwhile
    assert now[0] <= threads, "no new one is left, however many others have ended"
    assert now[1] <= descriptors
    assert now[2] <= maps + 8


@in_child
def test_a_model_without_a_name_lives_as_long_as_its_stream(kit: Path) -> None:
    """The natural one-liner: the model is dropped before its first token is computed."""
    wanted = Model(kit, context_tokens=128, threads=1).generate(PROMPT, max_tokens=5, temperature=0).result().text
    pieces = Model(kit, context_tokens=128, threads=1).generate(PROMPT, max_tokens=5, temperature=0)
    assert "".join(piece.text for piece in pieces) == wanted
    half_way = Model(kit, context_tokens=128, threads=1).generate(PROMPT, temperature=0)
    next(half_way)
    n_threads = threading.active_count()
    gc.disable()
    del half_way, pieces
    assert threading.active_count() < n_threads, "an abandoned stream keeps its model until the next garbage collection"


def test_cancelling_before_the_first_token(model: Model) -> None:
    """The prompt, which may take minutes, is not computed."""
    stream = model.generate(PROMPT, temperature=0)
    model.cancel()
    generation = stream.result()
    assert (generation.finish_reason, generation.token_ids) == ("cancelled", ())
    assert model.generate(PROMPT, max_tokens=4, temperature=0).result().finish_reason == "length"


def test_a_stream_left_half_way_leaves_the_conversation_usable(model: Model) -> None:
    whole = model.generate(PROMPT, max_tokens=8, temperature=0).result()
    for n_pieces in (0, 1, 3):
        stream = model.generate(PROMPT, max_tokens=8, temperature=0)
        for _ in range(n_pieces):
            next(stream)
        del stream
        assert model.generate(PROMPT, max_tokens=8, temperature=0).result().token_ids == whole.token_ids


def test_a_stream_that_was_ended_has_no_result(model: Model) -> None:
    stream = model.generate(PROMPT, temperature=0)
    next(stream)
    stream.close()
    stream.close()
    with pytest.raises(Cancelled, match="ended before"):
        stream.result()


def test_figures_of_a_generation_add_up(model: Model) -> None:
    before = model.stats
    model.generate("A new beginning", max_tokens=1).result()
    generation = model.generate(PROMPT, max_tokens=6, temperature=0).result()
    stats = model.stats
    assert stats.generations == before.generations + 2
    assert stats.completion_tokens - before.completion_tokens == 7
    assert 0 < generation.io.efficiency <= 1
    assert generation.prefill_tokens_per_s > 0
    assert generation.memory.budget_bytes == generation.plan.budget_bytes
    is_streamed = model.plan.mode == "streamed"
    assert (generation.io.bytes_read > 0) == is_streamed
    assert (generation.io.bytes_per_token > 0) == is_streamed


def test_a_token_reads_what_the_plan_says(grown: Path) -> None:
    """Reads ahead of what comes next may fall into this generation, or out of it: of many tokens that is little."""
    with Model(grown, **streamed()) as model:
        generation = model.generate(PROMPT, max_tokens=100, temperature=0, repeat_last_n=0).result()
        assert generation.completion_tokens == 100
        streamed_bytes = model.plan.streamed_bytes_per_pass
    assert 0.95 <= generation.io.bytes_per_token / streamed_bytes <= 1.05


def test_an_answer_that_is_late_when_its_prompt_was_read_ended_by_its_deadline(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was called cancelled: what watches the deadline cancels."""
    with Model(kit, context_tokens=256, threads=1) as model:
        stream = model._start(Request("Once", 5, turn=Turn(deadline_s=600)))
        answer, feed = stream._answer, model._session.feed

        def feed_until_late(prompt: Sequence[int]) -> Any:
            found = feed(prompt)
            answer._until_s = 0
            model.cancel()
            return found

        monkeypatch.setattr(model._session, "feed", feed_until_late)
        assert stream.result().finish_reason == "deadline"


def test_a_model_that_is_dropped_is_closed(kit: Path) -> None:
    before = {*threading.enumerate()}
    model = Model(kit, context_tokens=128, threads=1)
    assert {*threading.enumerate()} - before, "it has threads"
    del model
    gc.collect()
    assert {*threading.enumerate()} <= before


def test_an_answer_tells_how_likely_its_tokens_were(kit: Path) -> None:
    with Model(kit, context_tokens=256, threads=1) as model:
        pieces = list(model.generate("Once upon a time", max_tokens=5, temperature=0, top_logprobs=2))
    generation = pieces[-1].generation
    assert generation is not None
    assert [piece.logprobs for piece in pieces[:-1]] == [*generation.logprobs]
    assert [one[0][0] for one in generation.logprobs] == [*generation.token_ids]
    assert all(one[0] == one[1] and len(one) == 3 for one in generation.logprobs)


def test_an_answer_that_is_ended_early_keeps_what_it_said(kit: Path) -> None:
    """By the end of a block, and by an error in the middle: hundreds of tokens may be there by then."""
    with Model(kit, context_tokens=256, threads=1) as model:
        with model.generate("Once upon a time", max_tokens=50, temperature=0) as stream:
            pieces = [next(stream) for _ in range(4)]
        assert list(stream) == []
        assert stream.generation is None
        assert stream.text == "".join(piece.text for piece in pieces) != ""
        assert list(stream.token_ids) == [piece.token_ids[0] for piece in pieces]
        whole = model.generate("Once upon a time", max_tokens=50, temperature=0).result()
        assert whole.text.startswith(stream.text)

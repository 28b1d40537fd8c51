"""Configurations refuse, on construction, what cannot be, and name it: the CLI need not check again."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import re
import typing
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest

from edge_run.base.config import KV_TYPES, REPACK, ModelConfig
from edge_run.base.errors import ConfigError
from edge_run.base.options import check_types, config_of, make_config
from edge_run.base.sampling_config import SamplingConfig
from edge_run.base.units import GIB
from edge_run.runtime.generation.request import Turn


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("memory", "much", "size 'much'"),
        ("memory", 0, "size 0"),
        ("context_tokens", -1, "context length -1"),
        ("threads", 0, "threads 0"),
        ("threads", 513, "threads 513"),
        ("micro_batch_tokens", -1, "micro-batch -1"),
        ("sequences", -1, "sequences -1"),
        ("sequences", 257, "sequences 257"),
        ("readers", 0, "readers 0"),
        ("readers", 65, "readers 65"),
        ("backend", "vllm", "backend 'vllm'"),
        ("repack", "maybe", "repack 'maybe': must be one of auto, on, off"),
        ("flash_attention", "maybe", "flash attention 'maybe'"),
        ("kv_type", "f8", "KV type 'f8'"),
        ("kv_type", "f16/f8", "KV type 'f8'"),
        ("kv_type", "f16/f16/f16", "KV type 'f16/f16'"),
        ("kv_type", "", "KV type ''"),
        ("prompt_cache", "", "prompt cache: names no folder"),
        ("prompt_cache", "0", r"prompt cache '0': must be on, off or a folder; a folder of that name is \./0"),
        ("prompt_cache", "OFF", "prompt cache 'OFF': must be on, off or a folder"),
        ("kv_spill", "False", "kv spill 'False': must be on, off or a folder"),
    ],
)
def test_a_model_option_that_cannot_be(option: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(ModelConfig, {option: value})


def test_each_option_of_a_few_words_is_typed_as_these_and_takes_all_of_them() -> None:
    """So that editors name them; a type of keys and values may be one of hundreds of pairs."""
    hints = typing.get_type_hints(ModelConfig)
    words = {name: typing.get_args(hint) for name, hint in hints.items() if typing.get_origin(hint) is typing.Literal}
    assert words["repack"] == REPACK == ("auto", "on", "off")
    assert [name for name, hint in hints.items() if hint is str] == ["kv_type"]
    for name, choices in words.items():
        for choice in choices:
            assert getattr(make_config(ModelConfig, {name: choice, "draft": "small.gguf"}), name) == choice
        with pytest.raises(
            ConfigError, match=f"{name.replace('_', ' ')} 'no': must be one of {re.escape(choices[0])}, "
        ):
            make_config(ModelConfig, {name: "no"})
        with pytest.raises(ConfigError, match=f"{name.replace('_', ' ')} 3: must be text"):
            make_config(ModelConfig, {name: 3})


@dataclasses.dataclass(frozen=True)
class Open:
    """Options that may be left open, or be something else than a word."""

    way: Literal["on", "off"] | None = None
    place: Path | Literal["off"] | None = None
    count: Literal["all"] | int = 1

    def __post_init__(self) -> None:
        check_types(self)


def test_words_may_be_one_of_several_kinds() -> None:
    taken: list[dict[str, Any]] = [{"way": "on"}, {"way": None}, {"place": "anywhere"}, {"count": "all"}, {"count": 5}]
    for allowed in taken:
        assert dataclasses.asdict(make_config(Open, allowed)).items() >= allowed.items()
    for option, value, message in (
        ("way", "maybe", "way 'maybe': must be one of on, off or None"),
        ("way", 3, "way 3: must be text or None"),
        ("place", 3, "place 3: must be a path or text or None"),
        ("count", "some", "count 'some': must be one of all"),
        ("count", None, "count None: must be text or a whole number"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            make_config(Open, {option: value})


def test_a_folder_may_have_the_name_of_a_switch() -> None:
    assert ModelConfig(prompt_cache="./0").prompt_folder == Path("0")
    assert ModelConfig(kv_spill=Path("no")).spill_folder == Path("no")
    assert not ModelConfig(prompt_cache="off", kv_spill="off").keeps_prompts


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperature", -0.1, "temperature"),
        ("temperature", math.nan, "temperature"),
        ("top_k", -1, "top-k"),
        ("top_p", 0.0, "top-p"),
        ("top_p", 1.1, "top-p"),
        ("min_p", -0.1, "min-p"),
        ("min_p", 1.1, "min-p"),
        ("repeat_penalty", 0.0, "repeat penalty"),
        ("repeat_penalty", math.inf, "repeat penalty"),
        ("repeat_last_n", -2, "repeat last n"),
        ("seed", -1, "seed"),
        ("seed", 2**32 - 1, "seed"),  # llama.cpp's own sign for "draw one"
        ("stop", "", "stop string"),
        ("stop", ["a", ""], "stop string"),
    ],
)
def test_a_sampling_option_that_cannot_be(option: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(SamplingConfig, {option: value})


def test_a_grammar_and_a_schema_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="one of the two"):
        SamplingConfig(grammar='root ::= "a"', json_schema="{}")


@pytest.mark.parametrize("kind", [ModelConfig, SamplingConfig])
def test_an_unknown_option_is_refused_with_those_that_are_known(kind: type[Any]) -> None:
    with pytest.raises(ConfigError, match="'n_ctx': unknown") as caught:
        make_config(kind, {"n_ctx": 5})
    assert all(field.name in str(caught.value) for field in dataclasses.fields(kind))


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (ModelConfig, "n_ctx", "context_tokens"),
        (ModelConfig, "thread", "threads"),
        (SamplingConfig, "temp", "temperature"),
    ],
)
def test_an_unknown_option_is_told_what_it_is_called_here(kind: type[Any], given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{given}': unknown \(is it {meant}\?\)"):
        make_config(kind, {given: 1})


def test_what_the_caller_takes_besides_is_known_too() -> None:
    """`max_tokens` is of the request, and no field of `SamplingConfig`: it was not among those that were named."""
    for given in ("max_token", "max_new_tokens", "n_predict"):
        with pytest.raises(ConfigError, match=rf"{given}': unknown \(is it max_tokens\?\); known are max_tokens, temp"):
            make_config(SamplingConfig, {given: 5}, ("max_tokens",))
    assert make_config(SamplingConfig, {"top_k": 5}, ("max_tokens",)).top_k == 5
    with pytest.raises(ConfigError, match="known are mesh, memory"):
        config_of(ModelConfig, None, {"meshes": 1}, ("mesh",))


def test_a_schema_may_be_a_mapping() -> None:
    config = SamplingConfig(json_schema={"enum": ["red", "é"]})
    assert config == SamplingConfig(json_schema=config.json_schema_text)
    assert json.loads(config.json_schema_text) == {"enum": ["red", "é"]}
    assert SamplingConfig(json_schema=MappingProxyType({})).json_schema == "{}", "any JSON"
    assert SamplingConfig().json_schema_text == ""
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError, match="one of the two"):
        SamplingConfig(grammar='root ::= "a"', json_schema={})


@pytest.mark.parametrize("schema", [{"enum": {1}}, {"minimum": math.nan}, {("a",): 1}])
def test_a_schema_that_json_cannot_say_is_refused(schema: Any) -> None:
    with pytest.raises(ConfigError, match="JSON schema: must be what JSON can say"):
        SamplingConfig(json_schema=schema)


def test_weights_beside_a_gpu_are_not_repacked() -> None:
    with pytest.raises(ConfigError, match="repack on: runs on the processor alone"):
        ModelConfig(repack="on", gpu_memory="1GiB")
    assert ModelConfig(repack="on").gpu_memory == 0


def test_memory_is_bytes_whoever_wrote_it() -> None:
    assert ModelConfig(memory="2GiB").memory == ModelConfig(memory=2 * GIB).memory == 2 * GIB
    assert ModelConfig().memory is None


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_one_kv_type_is_that_of_both(kv_type: str) -> None:
    assert ModelConfig(kv_type=kv_type).kv_types == (kv_type, kv_type)


def test_two_kv_types_are_k_and_v() -> None:
    assert ModelConfig(kv_type="q8_0/q4_0").kv_types == ("q8_0", "q4_0")


def test_a_single_stop_string_is_not_taken_letter_by_letter() -> None:
    assert SamplingConfig(stop="END").stop == ("END",)
    assert SamplingConfig(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("name", ["temperature", "repeat_penalty"])
def test_what_is_no_number_of_32_bits_is_refused(name: str) -> None:
    for value in (math.inf, math.nan, 1e39, *([1e-46] if name == "repeat_penalty" else [])):
        with pytest.raises(ConfigError, match=name.replace("_", " ")):
            SamplingConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name", "value", "message"),
    [
        (ModelConfig, "threads", "4", "threads '4': must be a whole number or None"),
        (ModelConfig, "threads", True, "threads True: must be a whole number or None"),
        (ModelConfig, "context_tokens", 4096.0, "context tokens 4096.0: must be a whole number or None"),
        (ModelConfig, "kv_type", None, "kv type None: must be text"),
        (ModelConfig, "exact", 1, "exact 1: must be True or False"),
        (ModelConfig, "draft", 7, "draft 7: must be a path or text or None"),
        (ModelConfig, "memory", True, "size True: not a size; write it as"),
        (ModelConfig, "memory", [1], "size [1]: not a size; write it as"),
        (ModelConfig, "memory", math.nan, "size nan: not a size; write it as"),
        (SamplingConfig, "top_k", "40", "top k '40': must be a whole number"),
        (SamplingConfig, "temperature", None, "temperature None: must be a number"),
        (SamplingConfig, "stop", 3, "stop 3: must be a list"),
        (SamplingConfig, "logit_bias", [1], "logit bias [1]: must be a mapping"),
    ],
)
def test_a_value_of_another_type_is_refused(kind: type[Any], name: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        make_config(kind, {name: value})
    assert str(found.value).startswith(message)


def test_what_programs_compute_is_taken(tmp_path: Path) -> None:
    """Half of what psutil says is a float, and NumPy has whole numbers of its own."""
    config = ModelConfig(memory=3e9 * 0.5, threads=np.int64(2), cache_folder=str(tmp_path), also=tmp_path)  # type: ignore[arg-type]
    assert config.memory == 1_500_000_000
    assert config.cache == tmp_path
    assert SamplingConfig(temperature=1, top_p=np.float32(0.5), stop=iter(["a"])).stop == ("a",)  # type: ignore[arg-type]


def test_whole_numbers_of_other_kinds_become_pythons_own(tmp_path: Path) -> None:
    """NumPy's overflow, and are none that JSON has."""
    config = ModelConfig(threads=np.int64(2), sequences=np.uint8(3), cache_folder=tmp_path)  # type: ignore[arg-type]
    sampling = SamplingConfig(seed=np.int64(3), top_k=np.int32(4))  # type: ignore[arg-type]
    turn = Turn(priority=np.int16(-1))  # type: ignore[arg-type]
    found = [config.threads, config.sequences, sampling.seed, sampling.top_k, turn.priority]
    assert found == [2, 3, 3, 4, -1]
    assert {type(one) for one in found} == {int}
    assert config.exact is False
    assert SamplingConfig().seed is None

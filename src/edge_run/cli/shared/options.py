"""The settings of a run, as a table. Names are llama.cpp's where it has them.

Every one is None when it is not given, so that the defaults stand in one place: ModelConfig and SamplingConfig.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import click

from edge_run.base.config import (
    BACKENDS,
    EXPERT_POLICIES,
    EXPERT_PREFETCH,
    FLASH_ATTENTION,
    KV_KEEP_BY,
    KV_TYPES,
    MESH_ACTIVATIONS,
    PAGE_CACHE,
    REPACK,
    SPECULATE,
    ModelConfig,
)
from edge_run.base.sampling_config import SamplingConfig
from edge_run.cli.shared.setting import PATH, TEXT, Setting, size_option

MODEL = click.Argument(["model_file"], metavar="MODEL", type=PATH)
_DEFAULTS = {field.name: field.default for kind in (ModelConfig, SamplingConfig) for field in dataclasses.fields(kind)}
_FILE: dict[str, Any] = {"type": PATH, "metavar": "FILE"}
_NUMBER: dict[str, Any] = {"type": int, "metavar": "N"}
_FRACTION: dict[str, Any] = {"type": float, "metavar": "X"}
_TEXT: dict[str, Any] = {"type": TEXT, "metavar": "TEXT"}
_KV_HELP = ", ".join(KV_TYPES)
_IN_A_CHAT = "; on in a chat"


def _default(field: str) -> str:
    return f" [default: {_DEFAULTS[field]}]"


def _sampling(*names: str, field: str, help: str, **attributes: Any) -> Setting:
    return Setting(*names, group="Sampling", field=field, help=help + _default(field), **attributes)


_prompt = functools.partial(Setting, group="Prompt")
_answer = functools.partial(Setting, group="Answer")
_memory = functools.partial(Setting, group="Memory and speed")
_output = functools.partial(Setting, group="Output", default=None)

SETTINGS: tuple[Setting, ...] = (
    _prompt("-m", "--model", help="The model, instead of the first argument.", **_FILE),
    _prompt("-p", "--prompt", help="Text to continue as it is; with -cnv the first message of a chat.", **_TEXT),
    _prompt("-f", "--file", help="Read the prompt from FILE; one line break at its end is left out.", **_FILE),
    _prompt(
        "-cnv/-no-cnv",
        "--conversation/--no-conversation",
        " /--raw",
        default=None,
        help="Chat with the model's template, or continue plain text. [default: chat at a terminal where the model has "
        "a template; plain with -p, -f or a prompt from standard input]",
    ),
    _prompt("-sys", "--system-prompt", help="The system prompt: what a chat begins with.", **_TEXT),
    _prompt("--chat-template", help="Jinja text, or a file of it, instead of the model's.", metavar="TEXT"),
    _answer("-n", "--predict", "--n-predict", help="Tokens at most; -1: till the model ends. [default: -1]", **_NUMBER),
    _answer(
        "-r", "--stop", "--reverse-prompt", multiple=True, help="End before this text; may be repeated.", **_TEXT
    ),
    _answer("--grammar", help="GBNF that the answer must follow.", **_TEXT),
    _answer("--grammar-file", help="The same, from a file.", **_FILE),
    _answer("-j", "--json-schema", help="JSON schema that the answer must follow; {} is any JSON.", **_TEXT),
    _answer("-jf", "--json-schema-file", help="The same, from a file.", **_FILE),
    _sampling("--temp", "--temperature", field="temperature", help="0 always takes the best token.", **_FRACTION),
    _sampling("--top-k", field="top_k", help="Choose among the N best; 0: all.", **_NUMBER),
    _sampling("--top-p", field="top_p", help="Among the best that make up this probability.", **_FRACTION),
    _sampling("--min-p", field="min_p", help="Among those at least this probable, against the best.", **_FRACTION),
    _sampling("--repeat-penalty", field="repeat_penalty", help="On tokens used before; 1: none.", **_FRACTION),
    _sampling("--repeat-last-n", field="repeat_last_n", help="Tokens it looks back; -1: the context.", **_NUMBER),
    Setting(
        "--ignore-eos/--no-ignore-eos", group="Sampling", field="ignore_eos", default=None,
        help="The model never ends an answer: it goes on to -n. [default: no]",
    ),
    Setting("-s", "--seed", group="Sampling", help="-1 draws one. [default: -1]", **_NUMBER),
    _memory(
        "--memory", field="memory", callback=size_option, metavar="SIZE",
        help="Budget of the whole process, as 4GiB. [default: what is available, less a margin]",
    ),
    _memory(
        "--gpu-memory", field="gpu_memory", callback=functools.partial(size_option, least_bytes=0), metavar="SIZE",
        help="Budget of the GPU's memory, where llama.cpp is built for it; 0: leave it out. [default: 0]",
    ),
    _memory(
        "--op-offload/--no-op-offload", field="op_offload", default=None,
        help="Passes of many tokens run on the GPU, weights in memory copied there for each. [default: where it has "
        "memory of its own]",
    ),
    _memory(
        "-c", "--ctx-size", field="context_tokens", **_NUMBER,
        help="Tokens of context; 0: the model's own. [default: the model's own, as far as it costs nothing]",
    ),
    _memory("-t", "--threads", field="threads", help="Compute threads. [default: one per core]", **_NUMBER),
    _memory(
        "-ub", "--ubatch-size", field="micro_batch_tokens", **_NUMBER,
        help="Tokens in one pass of a prompt; 0: what is expected to be fastest under the budget, 512 at most. Part of "
        "the numerics key: another size may change the last bits of the logits." + _default("micro_batch_tokens"),
    ),
    _memory("-b", "--batch-size", help="As llama.cpp's: -ub is at most this.", **_NUMBER),
    _memory(
        "--kv-type", metavar="TYPE",
        help=f"Of the KV cache, or K/V: {_KV_HELP}; auto: what room, time and quality speak for." + _default("kv_type"),
    ),
    _memory("-ctk", "--cache-type-k", metavar="TYPE", help="The type of K alone."),
    _memory("-ctv", "--cache-type-v", metavar="TYPE", help="The type of V alone."),
    _memory(
        "-fa", "--flash-attn", field="flash_attention", type=click.Choice(FLASH_ATTENTION),
        help="Flash attention." + _default("flash_attention"),
    ),
    _memory(
        "--backend", field="backend", type=click.Choice(BACKENDS),
        help="edge-run keeps the budget; llama.cpp is its own loader." + _default("backend"),
    ),
    _memory("--readers", field="readers", help="Threads that read weights." + _default("readers"), **_NUMBER),
    _memory(
        "--also", field="also", **_FILE,
        help="A copy of the model on a second drive: both drives are read at once, and one may fail.",
    ),
    _memory(
        "--page-cache", field="page_cache", type=click.Choice(PAGE_CACHE),
        help="A model that fits is read from the kernel's page cache, and stays there for the next start where memory "
        "is free." + _default("page_cache"),
    ),
    _memory(
        "--expert-policy", field="expert_policy", type=click.Choice(EXPERT_POLICIES),
        help="What the memory for a model's experts keeps." + _default("expert_policy"),
    ),
    _memory(
        "--expert-prefetch", field="expert_prefetch", type=click.Choice(EXPERT_PREFETCH),
        help="Layers ahead that likely experts are read; auto: what measures faster." + _default("expert_prefetch"),
    ),
    _memory(
        "--packed", field="packed", metavar="FILE",
        help="The model's experts, compressed, or its weights, repacked, by edge-run pack; off: none. "
        "[default: MODEL.packed, where it is there]",
    ),
    _memory(
        "--repack", field="repack", type=click.Choice(REPACK),
        help="Whether weights are repacked for kernels that compute several rows at once; auto: "
        "the types that measured faster (edge-run probe). Part of the numerics key." + _default("repack"),
    ),
    _memory(
        "--cache-dir", field="cache_folder", type=PATH, metavar="FOLDER",
        help="For what is known of models and devices, and layers fetched over a mesh. [default: ~/.cache/edge-run]",
    ),
    _memory(
        "--prompt-cache", field="prompt_cache", metavar="on|off|FOLDER",
        help="Keep what was computed of prompts on disk, and read it back for prompts that begin alike. [default: off"
        f"{_IN_A_CHAT}]",
    ),
    _memory(
        "--prompt-cache-size", field="prompt_cache_size", callback=size_option, metavar="SIZE",
        help="What the prompt cache may take of the disk; the least recently used goes first. [default: 4GiB]",
    ),
    _memory(
        "--prompt-cache-daily", field="prompt_cache_daily", callback=size_option, metavar="SIZE",
        help="What the prompt cache may write in a day; flash wears out by writing. [default: 32GiB]",
    ),
    _memory(
        "--kv-spill", field="kv_spill", metavar="on|off|FOLDER",
        help="Keep keys and values that have no room in memory in a file without a name, and read them for each token. "
        "[default: off]",
    ),
    _memory(
        "--kv-keep", field="kv_keep", **_NUMBER,
        help="Tokens of the context that each token of an answer looks at, at most; 0: all. Less than all is lossy: "
        "what is computed is not the model's any more." + _default("kv_keep"),
    ),
    _memory(
        "--kv-keep-by", field="kv_keep_by", type=click.Choice(KV_KEEP_BY),
        help="Which tokens --kv-keep takes: pages or blocks whose keys answer best, or the first and the latest."
        + _default("kv_keep_by"),
    ),
    _memory(
        "--context-shift/--no-context-shift", field="context_shift", default=None,
        help="Where the context is full, take the older half of the text out of it and go on; what follows is not what "
        "the model gives for the text that is left. [default: no]",
    ),
    _memory(
        "--keep", field="context_keep_tokens", **_NUMBER,
        help="First tokens that --context-shift keeps, BOS not counted; -1: the prompt."
        + _default("context_keep_tokens"),
    ),
    _memory(
        "--check-file/--no-check-file", field="check_file", default=None,
        help="Open a file that is new in a process of its own first: some broken ones would end this one. "
        "[default: yes]",
    ),
    _memory(
        "-md", "--draft", "--model-draft", field="draft", **_FILE,
        help="A small model, which guesses what comes next: several guesses are verified at once.",
    ),
    _memory(
        "--speculate", field="speculate", type=click.Choice(SPECULATE),
        help="Guess with the draft model, with what came before in the text (ngram), or not; auto: both where there is "
        "a draft model." + _default("speculate"),
    ),
    _memory(
        "--draft-max", field="draft_tokens", **_NUMBER, help="Guesses at once, at most." + _default("draft_tokens")
    ),
    _memory(
        "--exact/--no-exact", field="exact", default=None,
        help="Compute so that speculation cannot change a token: no flash attention, no pass of a single token. "
        "[default: no]",
    ),
    _memory(
        "--mesh/--no-mesh", default=None,
        help="Spread the model over the devices of the mesh that this one joined (edge-run mesh). [default: no]",
    ),
    _memory(
        "--mesh-any-numerics/--no-mesh-any-numerics", default=None,
        help="Also use devices whose kernels may compute other last bits: tokens may then differ. [default: no]",
    ),
    _memory(
        "--mesh-activations", field="mesh_activations", type=click.Choice(MESH_ACTIVATIONS),
        help="What devices hand each other; compact: rounded to 8 bits a number where a link is slow, so that tokens "
        "may differ." + _default("mesh_activations"),
    ),
    _output("--json", is_flag=True, help="JSON on standard output, a line for each result, and nothing else."),
    _output("--display-prompt/--no-display-prompt", help="Repeat the prompt before the answer. [default: no]"),
    Setting(
        "-v", "--verbose", group="Output", count=True,
        help="Say what every setting resolved to, and log; -vv logs what llama.cpp says.",
    ),
)  # fmt: skip


_OF_ONE_ANSWER = {
    *("model", "prompt", "file", "conversation", "system_prompt", "json", "display_prompt", "stop"),
    *("grammar", "grammar_file", "json_schema", "json_schema_file"),
}


def _served(setting: Setting) -> Setting:
    """Return the setting as a command has it that knows no chats."""
    served = copy.copy(setting)
    served.help = (setting.help or "").replace(_IN_A_CHAT, "")
    return served


SERVED_SETTINGS = [_served(setting) for setting in SETTINGS if setting.name not in _OF_ONE_ANSWER]
"""The settings of commands that answer requests, which bring the others themselves."""


def some_settings(*names: str) -> list[Setting]:
    """Return the settings of these names, for another command that has them too."""
    return [setting for setting in SETTINGS if setting.name in names]


FLAGS = {setting.field: setting.opts[0] for setting in SETTINGS if setting.field}
FLAGS |= {"sequences": "--parallel", "is_overwritten": "--force", "budgets": "--budget", "target": "--output"}
"""The flags of what Python calls otherwise, for messages."""

"""Several texts at once, in one process, for `kv_spill_many.py`: by edge-run, or by llama.cpp alone. Prints JSON."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from _usage import peak_bytes, read_bytes, used_s

WIDTH = 256  # tokens in a pass of a prompt
TOKEN_CHARACTERS = 6  # of a text, more than a token has: what is not needed is not held


def text_of(arguments: argparse.Namespace) -> str:
    """Return as much of the text as the prompts are made of."""
    with arguments.text.open(encoding="utf-8", errors="replace") as file:
        return str(file.read(TOKEN_CHARACTERS * arguments.sequences * arguments.each))


def prompts_of(tokens: list[int], arguments: argparse.Namespace) -> list[list[int]]:
    """Return as many pieces of a text as there are sequences."""
    length = arguments.each - arguments.tokens
    step = max(1, (len(tokens) - length) // arguments.sequences)
    return [tokens[number * step : number * step + length] for number in range(arguments.sequences)]


def run_ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer with edge-run."""
    from edge_run import Model
    from edge_run.devices.host.memory import process_memory
    from edge_run.runtime.scheduling.widths import PassWidths

    PassWidths.with_prompts = lambda self, n_answers, are_few=False: self.most_tokens  # type: ignore[method-assign]
    with Model(
        arguments.model,
        memory=arguments.memory,
        sequences=arguments.sequences,
        context_tokens=arguments.sequences * arguments.each,
        micro_batch_tokens=WIDTH,
        threads=arguments.threads,
        kv_spill="on",
        repack="off",
    ) as model:
        tokens = model.tokenize(text_of(arguments), add_special=False)
        began, used = time.monotonic(), used_s()
        most_away = 0
        answers: dict[int, list[int]] = {}
        for number, piece in model.generate_many(
            prompts_of(tokens, arguments), max_tokens=arguments.tokens, temperature=0
        ):
            if isinstance(piece, Exception):
                raise piece
            answers.setdefault(number, []).extend(piece.token_ids)
            if spill := model.stats.kv_spill:
                most_away = max(most_away, spill.away_bytes)
        stats = model.stats
        spill = stats.kv_spill
        return {
            "wall_s": round(time.monotonic() - began, 1),
            "cpu_s": round(used_s() - used, 1),
            "peak_bytes": process_memory().peak_bytes,
            "read_bytes": stats.io.bytes_read,
            "away_bytes": most_away,
            "written_bytes": spill.written_bytes if spill else 0,
            "context_tokens": model.plan.context_tokens,
            "kv_bytes": model.plan.kv_bytes + model.plan.spilled_kv_bytes,
            "answers": [answers[number] for number in sorted(answers)],
        }


def run_plain(arguments: argparse.Namespace) -> dict[str, Any]:
    """Answer with llama.cpp alone: prompts one after the other, then a token of each text in each pass."""
    import llama_cpp.llama_cpp as low
    import numpy as np

    low.llama_backend_init()
    params = low.llama_model_default_params()
    params.use_extra_bufts = False  # weights that are repacked would be held a second time, in memory that is too small
    model = low.llama_model_load_from_file(str(arguments.model).encode(), params)
    vocabulary = low.llama_model_get_vocab(model)
    n_vocabulary = low.llama_vocab_n_tokens(vocabulary)
    text = text_of(arguments).encode()
    room = (low.llama_token * len(text))()
    n_tokens = low.llama_tokenize(vocabulary, text, len(text), room, len(text), False, False)
    shape = low.llama_context_default_params()
    shape.n_ctx, shape.n_batch, shape.n_ubatch = arguments.sequences * arguments.each, WIDTH, WIDTH
    shape.n_seq_max, shape.kv_unified = arguments.sequences, False
    shape.n_threads = shape.n_threads_batch = arguments.threads
    context = low.llama_init_from_model(model, shape)
    batch = low.llama_batch_init(WIDTH, 0, 1)

    def decode(tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, is_last) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, is_last
            batch.seq_id[i][0] = sequence
        if low.llama_decode(context, batch):
            raise SystemExit("llama.cpp failed to decode")
        rows = (low.llama_get_logits_ith(context, i) for i, one in enumerate(tokens) if one[3])
        return [int(np.ctypeslib.as_array(row, (n_vocabulary,)).argmax()) for row in rows]

    began, used = time.monotonic(), used_s()
    answers, made = list[list[int]](), list[int]()
    for sequence, prompt in enumerate(prompts_of(list(room[:n_tokens]), arguments)):
        for start in range(0, len(prompt), WIDTH):
            part = [
                (t, start + i, sequence, start + i + 1 == len(prompt)) for i, t in enumerate(prompt[start:][:WIDTH])
            ]
            made = decode(part)
        answers.append(made)
    length = arguments.each - arguments.tokens
    for step in range(arguments.tokens - 1):
        made = decode([(answer[-1], length + step, sequence, True) for sequence, answer in enumerate(answers)])
        for answer, token in zip(answers, made, strict=True):
            answer.append(token)
    return {
        "wall_s": round(time.monotonic() - began, 1),
        "cpu_s": round(used_s() - used, 1),
        "peak_bytes": peak_bytes(),
        "read_bytes": read_bytes(),
        "answers": answers,
    }


def main() -> None:
    """Answer, and say what it took."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--each", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--plain", action="store_true", help="by llama.cpp alone")
    arguments = parser.parse_args()
    print(json.dumps(run_plain(arguments) if arguments.plain else run_ours(arguments)))


if __name__ == "__main__":
    main()

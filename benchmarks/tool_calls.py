"""Tool calls of a small model through `edge-run serve` and through llama-server: fifty questions, three tools, greedy.

    python benchmarks/tool_calls.py MODEL --peer LLAMA-SERVER [--answers FILE]

With `tool_choice` `required`, each answer must be one call, of a tool that is there, with arguments that are JSON and
follow its schema. With `auto`, what counts is the right tool with the right arguments, and whether llama-server, asked
the same, gives the same call; where it gives one as text, as JSON, that is compared too. Answers are kept in FILE as
they come: a run that was ended goes on there.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from _box import ROOT, file_at, program_at, write_results
from _server_process import running

sys.path.insert(0, str(ROOT / "tests"))

from mosquitto import free_port
from served import served

CURRENCIES = ["USD", "EUR", "GBP", "JPY"]
TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "description": "Tells the weather of today in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city alone, as Lisbon"}},
            "required": ["city"],
        },
    },
    "set_timer": {
        "description": "Starts a kitchen timer, which rings after so many minutes.",
        "parameters": {
            "type": "object",
            "properties": {"minutes": {"type": "integer", "description": "How many minutes"}},
            "required": ["minutes"],
        },
    },
    "convert_money": {
        "description": "Converts an amount of money from one currency to another.",
        "parameters": {
            "type": "object",
            "properties": {
                "amount": {"type": "number"},
                "source": {"type": "string", "enum": CURRENCIES, "description": "The currency that it is in"},
                "target": {"type": "string", "enum": CURRENCIES, "description": "The currency that is wanted"},
            },
            "required": ["amount", "source", "target"],
        },
    },
}
WEATHER = {
    "What is the weather in Lisbon?": "Lisbon",
    "Do I need an umbrella in Bergen today?": "Bergen",
    "Is it raining in Hamburg right now?": "Hamburg",
    "How warm is it in Nairobi?": "Nairobi",
    "Tell me the weather in Kyoto, please.": "Kyoto",
    "I am about to land in Montreal. What is it like outside?": "Montreal",
    "Is it sunny in Seville today?": "Seville",
    "Weather Oslo": "Oslo",
    "Should I wear a coat in Warsaw today?": "Warsaw",
    "How is the weather in Buenos Aires?": "Buenos Aires",
    "Is there snow in Innsbruck?": "Innsbruck",
    "Can you check how windy it is in Wellington?": "Wellington",
    "My sister lives in Cairo. Is it hot there today?": "Cairo",
    "What are the conditions in Reykjavik?": "Reykjavik",
    "Give me the weather of today for Mumbai.": "Mumbai",
    "Is it cold in Helsinki?": "Helsinki",
    "I want to go running in Dublin. How is the weather?": "Dublin",
}
TIMERS = {
    "Set a timer for 10 minutes.": 10,
    "Wake me in 25 minutes.": 25,
    "The eggs need 7 minutes, start a timer.": 7,
    "Remind me in three minutes to turn the steak.": 3,
    "Start a timer of 45 minutes for the bread.": 45,
    "Timer, 12 minutes": 12,
    "My tea has to stand for 4 minutes. Set a timer.": 4,
    "Please ring in 30 minutes.": 30,
    "I put a cake into the oven, it takes 50 minutes. Set the timer.": 50,
    "Let the timer ring in 8 minutes.": 8,
    "Count down 15 minutes for me.": 15,
    "Set the kitchen timer to 20 minutes.": 20,
    "The pasta is done in 9 minutes, tell me when.": 9,
    "Give me a timer for six minutes.": 6,
    "I will take a nap. Set a timer for 90 minutes.": 90,
    "Start a 5 minute timer.": 5,
    "Could you set a timer for 35 minutes?": 35,
}
MONEY = {
    "How much is 100 USD in EUR?": (100, "USD", "EUR"),
    "Convert 250 euros to British pounds.": (250, "EUR", "GBP"),
    "What are 5000 yen in US dollars?": (5000, "JPY", "USD"),
    "Convert 80 GBP to JPY.": (80, "GBP", "JPY"),
    "I have 60 dollars. How many euros is that?": (60, "USD", "EUR"),
    "Change 12.5 EUR into USD.": (12.5, "EUR", "USD"),
    "How many yen do I get for 300 US dollars?": (300, "USD", "JPY"),
    "What is 45 pounds sterling in euros?": (45, "GBP", "EUR"),
    "Turn 1500 JPY into GBP.": (1500, "JPY", "GBP"),
    "A hotel costs 120 euros a night. What is that in dollars?": (120, "EUR", "USD"),
    "Convert 999 USD to GBP.": (999, "USD", "GBP"),
    "The ticket is 20000 yen. How much is it in euros?": (20000, "JPY", "EUR"),
    "Tell me what 75 GBP are in USD.": (75, "GBP", "USD"),
    "500 EUR in JPY?": (500, "EUR", "JPY"),
    "Exchange 40 dollars for pounds.": (40, "USD", "GBP"),
    "How much are 33 euros in pounds?": (33, "EUR", "GBP"),
}
QUESTIONS: list[tuple[str, str, dict[str, Any]]] = [
    *((question, "get_weather", {"city": city}) for question, city in WEATHER.items()),
    *((question, "set_timer", {"minutes": minutes}) for question, minutes in TIMERS.items()),
    *(
        (question, "convert_money", dict(zip(("amount", "source", "target"), parts, strict=True)))
        for question, parts in MONEY.items()
    ),
]
KINDS: dict[str, Any] = {"string": str, "integer": int, "number": (int, float)}
CONTEXT_TOKENS, MOST_TOKENS, ANSWER_S = 2048, 128, 300.0


def main() -> None:
    """Ask both servers everything, and write down how often the calls were right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=file_at)
    parser.add_argument("--peer", type=program_at, required=True, help="llama-server")
    parser.add_argument("--answers", type=Path, help="kept here, and not asked for again")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one question of N, to try it out")
    given = parser.parse_args()
    questions = QUESTIONS[:: given.every]
    with tempfile.TemporaryDirectory() as folder:
        answers = given.answers or Path(folder, "answers.jsonl")
        known = [json.loads(line) for line in answers.read_text().splitlines()] if answers.exists() else []
        for name, server in (("edge-run", ours), ("llama-server", peer)):
            done = {(one["choice"], one["question"]) for one in known if one["server"] == name}
            asked = [(c, *q) for c in ("auto", "required") for q in questions if (c, q[0]) not in done]
            if not asked:
                continue
            with server(given) as url:
                for choice, question, tool, arguments in asked:
                    told = {"server": name, "choice": choice, "question": question, "tool": tool, "wanted": arguments}
                    found = {**told, **ask(url, question, choice)}
                    known.append(found)
                    with answers.open("a") as file:
                        file.write(json.dumps(found) + "\n")
    rows = [{**one, "calls": json.dumps(one["calls"]), "wanted": json.dumps(one["wanted"])} for one in known]
    write_results("tool-calls", rows, f"{(__doc__ or '').strip()}\n\n{table(known, given.model, len(questions))}")


@contextlib.contextmanager
def ours(given: argparse.Namespace) -> Iterator[str]:
    """Serve the model with edge-run in this block; yield the address."""
    with served(given.model, "-c", CONTEXT_TOKENS, "-t", given.threads, "--parallel", 1) as server:
        yield server.url


@contextlib.contextmanager
def peer(given: argparse.Namespace) -> Iterator[str]:
    """The same with llama-server."""
    port = free_port()
    command = [given.peer, "-m", given.model, "--jinja", "-c", CONTEXT_TOKENS, "-t", given.threads, "-np", 1]
    with tempfile.TemporaryFile("w+") as log, running([*command, "--port", port], port, log):
        yield f"http://127.0.0.1:{port}"


def ask(url: str, question: str, choice: str) -> dict[str, Any]:
    """Return the calls of an answer as (name, arguments as text), and its text."""
    body = {
        "messages": [{"role": "user", "content": question}],
        "tools": [{"type": "function", "function": {"name": name, **tool}} for name, tool in TOOLS.items()],
        "tool_choice": choice,
        "temperature": 0,
        "max_tokens": MOST_TOKENS,
        "parallel_tool_calls": False,
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWER_S)
    if answer.status_code != 200:
        return {"calls": [], "text": f"status {answer.status_code}: {answer.text[:200]}"}
    message = answer.json()["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return {"calls": calls, "text": message.get("content") or ""}


def parsed(found: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the one call of an answer, with its arguments; None where there is none, several, or no JSON object."""
    if len(found["calls"]) != 1:
        return None
    name, text = found["calls"][0]
    try:
        arguments = json.loads(text)
    except ValueError:
        return None
    return (name, arguments) if isinstance(arguments, dict) else None


def written(found: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return the same, or the JSON of a call where that is the only JSON in the text of an answer."""
    text = found["text"]
    if found["calls"] or "{" not in text:
        return parsed(found)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        call = json.loads(text[text.index("{") : text.rindex("}") + 1])
        return call["name"], call["arguments"]
    return None


def is_valid(found: dict[str, Any]) -> bool:
    """Return whether an answer is one call that follows the schema of a tool that is there."""
    call = parsed(found)
    if call is None or call[0] not in TOOLS:
        return False
    form = TOOLS[call[0]]["parameters"]
    known = form["properties"]
    return set(form["required"]) <= call[1].keys() <= known.keys() and all(
        isinstance(value, KINDS[known[key]["type"]])
        and not isinstance(value, bool)
        and value in known[key].get("enum", [value])
        for key, value in call[1].items()
    )


def is_right(found: dict[str, Any]) -> bool:
    """Return whether the tool and its arguments are those that the question asks for."""
    return parsed(found) == (found["tool"], found["wanted"])


def table(known: list[dict[str, Any]], model: Path, n: int) -> str:
    """Return how often calls were valid, right, and the same at both, of `n` questions."""
    lines = [f"{model.name}, temperature 0, of {n} questions each:", ""]
    lines += ["| `tool_choice` | | edge-run | llama-server | the same call at both |", "|---|---|---|---|---|"]
    for choice in ("required", "auto"):
        sides = [
            {one["question"]: one for one in known if (one["server"], one["choice"]) == (server, choice)}
            for server in ("edge-run", "llama-server")
        ]
        pairs = [(parsed(one), sides[1][question]) for question, one in sides[0].items() if question in sides[1]]
        same = sum(call is not None and call == parsed(other) for call, other in pairs)
        same_text = sum(call is not None and call == written(other) for call, other in pairs)
        for what, holds in (("a call that follows the schema", is_valid), ("the right tool and arguments", is_right)):
            one, other = (sum(map(holds, side.values())) for side in sides)
            lines.append(f"| `{choice}` | {what} | {one} | {other} | {same}; {same_text} with those as text |")
    wrong = [one for one in known if one["server"] == "edge-run" and not is_right(one)]
    lines += ["", "What was not right at edge-run:", ""]
    lines += [f"* {one['choice']}: {one['question']} - {one['calls'] or one['text'][:120]!r}" for one in wrong]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

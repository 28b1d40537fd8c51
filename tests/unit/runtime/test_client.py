"""The client of a server: addresses, streams, refusals, and what a load comes to."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from edge_run.base.bench import LoadSpread
from edge_run.base.errors import ConfigError, ContextFull, ProtocolError, TierReadError
from edge_run.cli.reports.load_table import describe
from edge_run.runtime.client import load
from edge_run.runtime.client.answer_event import AnswerEvent
from edge_run.runtime.client.connection import ServerAddress, ServerClient, _document, server_address
from edge_run.runtime.client.load import LoadTask, Tally, run_load, spread_of, summed


class Handler(BaseHTTPRequestHandler):
    """Answers by the path that is asked: a stream, one that breaks off, an error in one, a refusal, or nonsense."""

    protocol_version = "HTTP/1.1"
    seen: list[tuple[str, Any]] = []  # noqa: RUF012 - of the one server at a time

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append((self.headers.get("authorization", ""), body))
        if self.path == "/full":
            self._whole(400, json.dumps({"error": body["says"]}))
            return
        if self.path == "/refused":
            self._whole(429, json.dumps({"error": {"message": "too many"}}), **{"retry-after": "7"})
            return
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self._chunk(b": a comment\n\n")
        for number in range(3):
            self._event({"choices": [{"text": f"{number} "}]})
        if self.path == "/failing":
            self._event({"error": {"message": "the drive is gone", "type": body.get("type")}})
        if self.path == "/broken":
            self.close_connection = True
            return
        if self.path == "/odd":
            self._event(body["says"])
        self._event({"choices": [], "usage": {"completion_tokens": 4, "prompt_tokens": 10}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def do_GET(self) -> None:
        self._whole(*((401, '{"error": "needs a key"}') if self.path == "/locked" else (200, "<html>")))

    def log_message(self, *_: object) -> None:
        pass

    def _whole(self, status: int, text: str, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def _event(self, document: Any) -> None:
        self._chunk(f"data: {json.dumps(document)}\n\n".encode())

    def _chunk(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # the client may be gone
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))


@pytest.fixture
def address() -> Iterator[ServerAddress]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        Handler.seen.clear()
        yield ServerAddress("127.0.0.1", server.server_port, key="a-key")
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("8080", "http://127.0.0.1:8080"),
        ("localhost:81", "http://localhost:81"),
        ("[::1]", "http://[::1]:80"),
        ("http://box:81", "http://box:81"),
        ("https://box/v1/", "https://box:443"),
        ("https://box/models", "https://box:443/models"),
        ("http://[::1]:9", "http://[::1]:9"),
    ],
)
def test_addresses(text: str, wanted: str) -> None:
    assert str(server_address(text, "secret")) == wanted
    assert "secret" not in repr(server_address(text, "secret"))


def test_a_key_goes_in_clear_text_where_that_was_written_only() -> None:
    assert str(server_address("box:81")) == "http://box:81"
    with pytest.raises(ConfigError, match="clear text"):
        server_address("box:81", "secret")


@pytest.mark.parametrize("text", ["", "ftp://box", "http://", "http://box:no", "http://me:word@box", "http://[", "a?b"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ConfigError, match="--server"):
        server_address(text)


@pytest.mark.parametrize("nonsense", ["[" * 100_000, '{"choices": ' + "[" * 5000])
def test_documents_without_end_are_a_servers_fault(address: ServerAddress, nonsense: str) -> None:
    with pytest.raises(ProtocolError, match="not JSON"):
        _document(address, nonsense)


def test_an_answer_has_an_end(address: ServerAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_run.runtime.client.connection.MOST_ANSWER_BYTES", 40)
    with pytest.raises(ProtocolError, match="more than"):
        list(ServerClient(address).stream("/good", {}))


def test_a_stream_and_another_one(address: ServerAddress) -> None:
    client = ServerClient(address)
    for _ in range(2):
        found = list(client.stream("/stream", {"prompt": "a"}))
        assert [one["choices"][0]["text"] for one in found[:3]] == ["0 ", "1 ", "2 "]
    next(events := client.stream("/stream", {}))
    events.close()
    assert len(list(client.stream("/stream", {}))) == 4, "what was left of the one before is not taken for it"
    assert Handler.seen[0] == ("Bearer a-key", {"prompt": "a", "stream": True})


def test_the_space_of_an_event_may_be_missing(address: ServerAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk = Handler._chunk
    odd = b"data:\n\n"  # which says that the server is there
    monkeypatch.setattr(
        Handler, "_chunk", lambda self, data: chunk(self, data and odd + data.replace(b"data: ", b"data:"))
    )
    documents = [*ServerClient(address).stream("/some", {})]
    assert [one["choices"][0]["text"] for one in documents if one["choices"]] == ["0 ", "1 ", "2 "]


def test_what_goes_wrong_says_what(address: ServerAddress) -> None:
    client = ServerClient(address)
    with pytest.raises(ConfigError, match=r"too many \(in 7 s\)"):
        list(client.stream("/refused", {}))
    with pytest.raises(ProtocolError, match="the drive is gone"):
        list(client.stream("/failing", {}))
    with pytest.raises(ProtocolError, match=str(address.port)):
        list(client.stream("/broken", {}))
    with pytest.raises(ConfigError, match="needs a key; give a key with --api-key-file"):
        client.get("/locked")
    with pytest.raises(ProtocolError, match="not JSON"):
        client.get("/page")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client = ServerClient(ServerAddress("127.0.0.1", free.getsockname()[1]))
        with pytest.raises(ConfigError, match="nobody listens"):
            client.get("/")


@pytest.mark.parametrize(
    ("says", "is_full"),
    [
        ({"code": "context_length_exceeded"}, True),
        ({"code": 400, "type": "exceed_context_size_error"}, True),
        ({"code": "invalid", "type": "invalid_request_error"}, False),
        ({"code": None, "type": ["context_length_exceeded"]}, False),
        ("context_length_exceeded", False),
    ],
)
def test_a_text_without_room_is_told_from_other_mistakes(address: ServerAddress, says: Any, is_full: bool) -> None:
    client = ServerClient(address)
    with pytest.raises(ContextFull if is_full else ConfigError, match=str(address.port)):
        list(client.stream("/full", {"says": says}))
    with pytest.raises(ContextFull, match="the drive is gone"):
        list(client.stream("/failing", {"type": "exceed_context_size_error"}))


@pytest.mark.parametrize(
    "odd",
    [5, [], "text", {"choices": 5}, {"choices": ["a"]}, {"choices": [{"delta": 5}]}, {"choices": [{"text": 5}]},
     {"usage": 5}, {"usage": {"completion_tokens": [1]}}, {"usage": {"completion_tokens": 1e999}}, {"timings": [1]},
     {"usage": {"completion_tokens": 10**400}}, {"usage": {"completion_tokens": -1}},
     {"usage": {"prompt_tokens": 10**400}}],
)  # fmt: skip
def test_an_event_that_is_none_is_an_error_in_one_line(address: ServerAddress, odd: object) -> None:
    with pytest.raises(ProtocolError, match=r"^http://\S+: what came is not an event of an answer; is it"):
        list(ServerClient(address).answer("/odd", {"says": odd}))


def test_an_event_may_lack_what_it_does_not_say(address: ServerAddress) -> None:
    for odd in ({}, {"choices": None, "usage": None}, {"choices": [{"delta": None, "finish_reason": None}]}):
        assert list(ServerClient(address).answer("/odd", {"says": odd}))[3] == AnswerEvent()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_are_told_apart(address: ServerAddress, name: str) -> None:
    says = {"choices": [{"delta": {name: "Hm.", "content": None}}]}
    assert list(ServerClient(address).answer("/odd", {"says": says}))[3] == AnswerEvent(reasoning="Hm.")


def test_a_load_goes_on_after_events_that_are_none(address: ServerAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "RETRY_S", 0.01)
    monkeypatch.setattr(Handler, "_event", lambda handler, document: handler._chunk(b"data: 5\n\n"))
    found = run_load(address, LoadTask(2, 0.3, 5, 4), lambda second: None)
    assert found.errors > 2, "no client has left"
    assert "is not an event" in found.messages[0]


def test_a_load_counts_what_comes(address: ServerAddress) -> None:
    found = run_load(address, LoadTask(3, 0.3, 5, 4, "a-model"), lambda second: None)
    assert found.answers >= 3
    assert found.errors == 0
    assert found.tokens >= 4 * found.answers
    assert found.prompt_tokens - 10 * found.answers in (0, 10, 20, 30)  # of answers that the end cuts off, too
    assert found.first_token_s
    prompts = [body["prompt"] for _, body in Handler.seen]
    assert len(set(prompts)) == len(prompts)
    assert {(body["model"], body["max_tokens"], len(body["prompt"].split())) for _, body in Handler.seen} == {
        ("a-model", 4, 6)
    }


def test_a_load_asks_nothing_that_an_earlier_one_has_asked(address: ServerAddress) -> None:
    """A server that holds its prompts still would read nothing."""
    seen = list[set[str]]()
    for _ in range(2):
        run_load(address, LoadTask(2, 0.2, 5, 4), lambda second: None)
        seen.append({body["prompt"] for _, body in Handler.seen})
        Handler.seen.clear()
    assert all(seen)
    assert seen[0].isdisjoint(seen[1])


def test_clients_for_which_there_are_no_threads_are_an_error_in_one_line(
    address: ServerAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, clients = threading.Thread.start, list[threading.Thread]()

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "edge-run-load-2":
            raise RuntimeError("can't start new thread")
        clients.extend([thread] * thread.name.startswith("edge-run-load"))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(TierReadError, match=r"^starting the clients: can't start new thread; end other programs"):
        run_load(address, LoadTask(3, 30.0, 5, 4), lambda second: None)
    assert len(clients) == 2
    for client in clients:
        client.join(30)
        assert not client.is_alive(), "those that were started end"


def test_the_sums_and_their_words() -> None:
    values = [float(number) for number in range(1, 101)]
    assert spread_of(values) == LoadSpread(50.0, 90.0, 99.0)
    assert spread_of([3.0]) == LoadSpread(3.0, 3.0, 3.0)
    tallies = [
        Tally(2, 20, 8, [1.0, 2.0], [0.1], [3.0, 4.0]),
        Tally(errors=Counter({"refused": 3})),
    ]
    load = summed("http://box:80", LoadTask(2, 10, 4, 10), tallies, 10.0)
    assert (load.answers, load.errors, load.messages, load.tokens_per_s) == (2, 3, ("refused",), 2.0)
    text = describe(load)
    assert "2 clients at a time, 10 s" in text
    assert "2 tokens/s: 20 tokens, 2 answers, 3 errors" in text
    assert "time to first token  1.000 s  2.000 s  2.000 s" in text

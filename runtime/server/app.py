"""The application: which path is answered by what, behind the guard."""

from __future__ import annotations

import contextlib
import logging
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_run.base.errors import EdgeRunError
from edge_run.runtime.server.access import WHOSE, Access, digest, given_key
from edge_run.runtime.server.answers import json_response
from edge_run.runtime.server.apis import anthropic_messages, embeddings, llama_server, ollama
from edge_run.runtime.server.apis.models import models, one_model
from edge_run.runtime.server.apis.openai_chat import chat_completions, count_chat
from edge_run.runtime.server.apis.openai_completions import completions
from edge_run.runtime.server.apis.responses import count_response, responses
from edge_run.runtime.server.bodies import BODY
from edge_run.runtime.server.connections import PIECE_BYTES, UnreadRoom
from edge_run.runtime.server.page_files import page_handlers
from edge_run.runtime.server.refusals import REQUEST_ID, Refusal, refusal_of
from edge_run.runtime.server.service import Service
from edge_run.runtime.server.status import status

Handler = Callable[[Service, Request], Awaitable[ASGIApp]]

ALLOWED_METHODS = "GET, POST, OPTIONS"
CORS_S = 600
ID_HEADERS = ("x-request-id", "request-id")  # OpenAI's, and Anthropic's
READABLE_HEADERS = ", ".join(("retry-after", "x-should-retry", *ID_HEADERS))  # for pages of other sites
HEADERS: Mapping[str, str] = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
}

logger = logging.getLogger(__name__)


class _Dropped(Exception):
    """A client that does not read is left, in the middle of its answer."""


def make_app(service: Service, access: Access, has_metrics: bool = False) -> Guard:
    """Return the application that serves models to those who may ask."""
    posts: dict[str, Handler] = {
        **_with_and_without_v1("/chat/completions", chat_completions),
        **_with_and_without_v1("/chat/completions/input_tokens", count_chat),
        "/v1/completions": completions,
        **_with_and_without_v1("/responses", responses),
        **_with_and_without_v1("/responses/input_tokens", count_response),
        "/v1/messages": anthropic_messages.messages,
        "/v1/messages/count_tokens": anthropic_messages.count_tokens,
        "/api/chat": ollama.ollama_chat,
        "/api/generate": ollama.ollama_generate,
        "/completion": llama_server.completion,
        "/completions": llama_server.completion,
        "/infill": llama_server.infill,
        "/apply-template": llama_server.apply_template,
        "/v1/embeddings": embeddings.embeddings,
        "/api/embed": embeddings.ollama_embed,
        "/api/embeddings": embeddings.ollama_embeddings,
        "/embedding": embeddings.native_embeddings,
        "/embeddings": embeddings.native_embeddings,
        "/api/show": ollama.show,
        "/tokenize": llama_server.tokenize,
        "/detokenize": llama_server.detokenize,
    }
    gets: dict[str, Handler] = {
        "/health": health,
        "/v1/health": health,
        "/edge-run/status": status,
        "/api/tags": ollama.tags,
        "/api/ps": ollama.running_models,
        "/api/version": ollama.version,
        "/props": llama_server.props,
        "/slots": llama_server.slots,
        **_with_and_without_v1("/models", models),
        "/v1/models/{model:path}": one_model,
    }
    if has_metrics:
        from edge_run.runtime.server.metrics import metrics  # whose library takes 2 MiB

        gets["/metrics"] = metrics
    routes = [
        Route(path, partial(handler, service), methods=[method])
        for method, handlers in (("POST", posts), ("GET", gets))
        for path, handler in handlers.items()
    ]
    routes += [Route(path, handler, methods=["GET"]) for path, handler in page_handlers().items()]
    # Redirected to the path without a slash at its end, a request would go where this server takes its address to be:
    # behind a proxy that speaks HTTPS, to one in clear text.
    return Guard(Router(routes, redirect_slashes=False), access)


def _with_and_without_v1(path: str, handler: Handler) -> dict[str, Handler]:
    """Return a path as OpenAI has it, and as llama-server has it too."""
    return {f"/v1{path}": handler, path: handler}


class Guard:
    """Lets through who may ask, and turns what is refused into the error document of the API that was spoken.

    access: who may ask; another one counts from the next request on.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self.access, self._unread = app, access, UnreadRoom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. No header or body of it is logged."""
        if scope["type"] != "http":
            return
        began_s, status = time.monotonic(), 0
        method, path = scope["method"], scope["path"]
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        request_id = f"req_{uuid.uuid4().hex}"
        more = self._headers_for(headers, request_id)

        async def send_guarded(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = {name for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *((name, value) for name, value in more if name not in own),
                ]
            if len(message.get("body", b"")) <= PIECE_BYTES:
                await send(message)
            elif not await self._unread.write(send, message, whose):
                raise _Dropped

        whose, body = "", contextlib.ExitStack()
        try:
            self.access.check(method, path, headers, scope["scheme"], scope["http_version"])
            if method == "OPTIONS":
                await _preflight(headers)(scope, receive, send_guarded)
            else:
                whose = digest(given_key(headers)).hex() if self.access.keys else ""
                ours = {"app": self, WHOSE: whose, BODY: body, REQUEST_ID: request_id}
                await self._app({**scope, **ours}, receive, send_guarded)
        except _Dropped:
            logger.info("a client is dropped that reads too slowly")
        except Exception as error:
            refusal = _refusal(error)
            if status:
                raise  # the client has a part of the answer: the end of the connection says that it is not all
            response = json_response(refusal.document(path, request_id), refusal.status, refusal.headers())
            await response(scope, receive, send_guarded)
        finally:
            body.close()
            logger.info("%s %s: %d in %.2f s, %s", method, path, status, time.monotonic() - began_s, request_id)

    def _headers_for(self, headers: Mapping[str, str], request_id: str) -> list[tuple[bytes, bytes]]:
        """Return what every answer says, and to pages of other sites that may ask, that they may read it."""
        said = {**HEADERS, **dict.fromkeys(ID_HEADERS, request_id)}
        origin = headers.get("origin", "")
        if self.access.allows(origin):
            said.update({"access-control-allow-origin": origin, "vary": "Origin"})
            said["cross-origin-resource-policy"] = "cross-origin"
            said["access-control-expose-headers"] = READABLE_HEADERS
        return [(name.encode(), value.encode("latin-1")) for name, value in said.items()]


def _refusal(error: Exception) -> Refusal:
    if isinstance(error, Refusal):
        return error
    if isinstance(error, EdgeRunError):
        return refusal_of(error)
    if isinstance(error, HTTPException):
        message = {404: "no such path", 405: "not with this method"}.get(error.status_code, "")
        refusal = Refusal(error.status_code, message)
        refusal.more_headers = error.headers or {}  # `Allow`
        return refusal
    place = traceback.extract_tb(error.__traceback__)[-1]  # not the message, which may quote the request
    logger.error("a mistake of the server's own: %s at %s:%s", type(error).__name__, place.filename, place.lineno)
    return Refusal(500, "a mistake of the server's own")


def _preflight(headers: Mapping[str, str]) -> Response:
    """Return the answer to a browser that asks whether a page may ask."""
    said = {
        "access-control-allow-methods": ALLOWED_METHODS,
        "access-control-allow-headers": headers.get("access-control-request-headers", "authorization, content-type"),
        "access-control-max-age": str(CORS_S),
    }
    if headers.get("access-control-request-private-network") == "true":
        said["access-control-allow-private-network"] = "true"
    return Response(status_code=204, headers=said)


async def health(service: Service, request: Request) -> Response:
    """Say whether requests are taken, and have an answer before long."""
    if service.admission.is_closed:
        return json_response({"status": "shutting down"}, 503)
    if not service.catalogue.is_usable:
        return json_response({"status": "loading model"}, 503)
    return json_response({"status": "ok"})

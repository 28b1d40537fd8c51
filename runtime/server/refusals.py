"""Why a request is not carried out: an HTTP status, a message, and the error document of the API that was spoken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from edge_run.base.errors import (
    Cancelled,
    ConfigError,
    ContextFull,
    EdgeRunError,
    MeshError,
    NotSupported,
    lacks_room,
)
from edge_run.base.files.texts import as_text

OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ANTHROPIC_TYPES = {
    **OPENAI_TYPES,
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
REQUEST_ID = "edge_run.request"  # of an ASGI scope
_RETRY_STATUSES = (429, 503)


class Refusal(Exception):
    """A request that is not carried out.

    status: of HTTP. param: which part of the request is wrong. code: a word for programs.
    retry_after_s: when it may be asked again. closes: the connection ends with this answer, its request unread.
    kind: what llama-server calls its type; empty: what OpenAI calls those of its status. figures: what it says besides.
    more_headers: what its headers say besides.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        closes: bool = False,
        kind: str = "",
        figures: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.retry_after_s, self.closes = retry_after_s, closes
        self.kind, self.figures = kind, figures or {}
        self.more_headers: Mapping[str, str] = {}

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to it; SDKs of OpenAI and Anthropic obey `x-should-retry`."""
        should_retry = "true" if self.status in _RETRY_STATUSES else "false"
        found = {**self.more_headers, "x-should-retry": should_retry}
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(1, round(self.retry_after_s)))
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        if self.closes:
            found["connection"] = "close"
        return found

    def document(self, path: str, request_id: str) -> Mapping[str, Any]:
        """Return the error as the API at `path` says it. request_id: of the request that is refused."""
        if path.startswith("/api/"):
            return {"error": self.message}
        if path.startswith("/v1/messages"):
            return anthropic_error(self, request_id)
        return openai_error(self)


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """Return the error as OpenAI says it."""
    by_class = "server_error" if refusal.status >= 500 else "invalid_request_error"
    kind = refusal.kind or OPENAI_TYPES.get(refusal.status, by_class)
    error = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code}
    return {"error": {**error, **refusal.figures}}


def anthropic_error(refusal: Refusal, request_id: str | None = None) -> dict[str, Any]:
    """Return the error as Anthropic says it. request_id: of the request that is refused."""
    by_class = "api_error" if refusal.status >= 500 else "invalid_request_error"
    kind = ANTHROPIC_TYPES.get(refusal.status, by_class)
    is_said = not refusal.param or refusal.message.startswith(refusal.param)
    message = refusal.message if is_said else f"{refusal.param}: {refusal.message}"
    if n_tokens := refusal.figures.get("n_prompt_tokens"):  # which has no code there: clients know it by these words
        most = refusal.figures["n_ctx"] - 1  # as an answer needs a token
        message = f"prompt is too long: {n_tokens} tokens > {most} maximum ({refusal.message})"
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def shutting_down(*, closes: bool = False) -> Refusal:
    """Return the refusal of what a server that ends does not begin, or does not finish."""
    message = "the server is shutting down"
    return Refusal(503, message, code="shutting_down", retry_after_s=5 if closes else None, closes=closes)


def refusal_of(error: EdgeRunError, prompt_param: str | None = None) -> Refusal:
    """Return what an error of ours means to a client. prompt_param: which part of its request is to be answered."""
    message = as_text(str(error))
    if isinstance(error, ContextFull):
        return Refusal(
            400,
            message,
            param=prompt_param,
            code=CONTEXT_LENGTH_EXCEEDED,
            kind="exceed_context_size_error",
            figures={"n_prompt_tokens": error.prompt_tokens, "n_ctx": error.context_tokens},
        )
    if isinstance(error, ConfigError):
        return Refusal(400, message)
    if isinstance(error, NotSupported):
        return Refusal(400, message, code="not_supported")
    if isinstance(error, MeshError) or lacks_room(error):  # which another answer gives back when it ends
        return Refusal(503, message, retry_after_s=30)
    if isinstance(error, Cancelled):
        return Refusal(503, "the answer was ended by the server", code="cancelled")
    return Refusal(500, message)

"""The page at `/`: its files, read once at the start, and what a browser may do with them.

A request names no file: it names a path, and the paths are a table. The page needs no key, for there is nothing in it:
what it shows it asks for, with the key that its user gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).with_name("page")
HTML, SCRIPT, STYLE, IMAGE = "text/html", "text/javascript", "text/css", "image/svg+xml"
_KINDS = {".html": HTML, ".js": SCRIPT, ".css": STYLE, ".svg": IMAGE}
PAGE = "/"
_NAMES = (
    "answering.js",
    "chat.js",
    "conversations.js",
    "dom.js",
    "icon.svg",
    "machine.js",
    "main.js",
    "markdown.js",
    "server.js",
    "style.css",
)
PAGE_FILES: Mapping[str, str] = {PAGE: "index.html", **{f"/page/{name}": name for name in _NAMES}}

# Trusted types: no script may make markup, so what a model says cannot become any by a mistake of the page.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Mapping[str, str] = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",  # kept, and asked for again: another version of edge-run may be there by then
}


def page_handlers() -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """Return what answers at each path of the page."""
    return {path: _handler(FOLDER / name) for path, name in PAGE_FILES.items()}


def _handler(file: Path) -> Callable[[Request], Awaitable[Response]]:
    data = file.read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    headers = {**HEADERS, "etag": etag}

    async def answer(request: Request) -> Response:
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(data, headers=headers, media_type=_KINDS[file.suffix])

    return answer

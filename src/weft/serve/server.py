"""The server: documents, the stream of changes and the page over HTTP. It changes nothing."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import ipaddress
import json
import logging
import mimetypes
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, RedirectResponse, StreamingResponse
from starlette.datastructures import MutableHeaders
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.errors import ConfigError, WeftError
from weft.serve.library import Library, NotFound
from weft.serve.report import page_files

log = logging.getLogger("weft.serve")

LOCAL_HOSTS = ("localhost", "*.localhost", "127.0.0.1", "[::1]")
"""The names of this machine."""


def make_app(library: Library, hosts: Sequence[str], closing: Callable[[], bool]) -> FastAPI:
    """The application without its guard.

    It answers only requests to one of `hosts`: a foreign page that had its name lead here (DNS rebinding) sends its
    own. Streams end once `closing` is true.
    """
    watched = Changes(library)

    def document(request: Request) -> Response:
        address = tuple(request.path_params["address"].split("/"))
        try:
            found = library.get(address, dict(request.query_params))
        except NotFound as problem:
            return _problem(str(problem), 404)
        except (WeftError, OSError) as problem:
            return _problem(str(problem), 422)
        except Exception as problem:
            log.exception("'%s' cannot be shown", request.url.path)
            return _problem(f"{type(problem).__name__}: {problem}", 500)
        return _tagged(request, found.body, found.tag, "application/json")

    async def stream(request: Request) -> Response:
        return StreamingResponse(watched.listen(closing), media_type="text/event-stream")

    def page(request: Request) -> Response:
        name = request.path_params["name"]
        file = page_files().get(name or "index.html")
        if file is None:
            return _problem(f"there is nothing at '/{name}'", 404)
        body, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return _tagged(request, body, hashlib.sha256(body).hexdigest()[:32], kind)

    routes = [Route("/api/stream", stream), Route("/api/{address:path}", document), Route("/{name:path}", page)]
    app = FastAPI(routes=list(routes), docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    return app


def _tagged(request: Request, body: bytes, tag: str, kind: str) -> Response:
    known = [word.strip().removeprefix("W/") for word in request.headers.get("if-none-match", "").split(",")]
    if f'"{tag}"' in known:
        return Response(status_code=304, headers={"etag": f'"{tag}"'})
    return Response(body, media_type=kind, headers={"etag": f'"{tag}"'})


def _problem(text: str, status: int, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"error": " ".join(text.split())}, status, headers)


POLICY = (
    "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; object-src 'none'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Guard:
    """An ASGI application around another one, which refuses requests that would change something or lack the token.

    The token comes as `Authorization: Bearer`, as the cookie, or once as `?token=`, which sets the cookie.
    """

    app: ASGIApp
    token: str | None
    cookie: str

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request, answer = Request(scope), self.app
        query = dict(request.query_params)
        is_first = _equal(query.pop("token", ""), self.token)
        if request.method not in ("GET", "HEAD"):
            answer = _problem("this server only shows: use GET", 405, {"allow": "GET, HEAD"})
        elif is_first and request.url.path == "/":  # out of the address bar and the history
            answer = RedirectResponse(f"/?{urlencode(query)}" if query else "/", 303)
        elif not is_first and not self._is_known(request):
            answer = _problem("a token is needed: open the address that `weft serve` printed", 401)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if is_first and request.method in ("GET", "HEAD"):
                    headers.append("set-cookie", f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict")
            await send(message)

        await answer(scope, receive, send_with_headers)

    def _is_known(self, request: Request) -> bool:
        word, _, bearer = request.headers.get("authorization", "").partition(" ")
        given = bearer.strip() if word.lower() == "bearer" else request.cookies.get(self.cookie, "")
        return self.token is None or _equal(given, self.token)


def _equal(given: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


EVERY = 0.5
"""Seconds between two checks of the files."""

BEAT = 15.0
"""Seconds of silence after which a comment is sent, so that the connection stays open."""

Signatures = tuple[dict[str, str], str]
"""Of the runs by name, and of the plans."""


class Changes:
    """What changes: while anybody listens, one task checks the files for all listeners."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._now: Signatures = {}, ""
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None

    async def listen(self, closing: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events, first of all runs, until the server closes or the listener leaves."""
        self._listeners += 1
        try:
            if self._task is None:
                await self._check()
                self._task = self._task or asyncio.create_task(self._watch())
            yield b"retry: 2000\n\n"
            seen, sent = None, time.monotonic()
            while not closing():
                now = self._now
                for change in changes(seen, now):
                    sent = time.monotonic()
                    yield f"event: changed\ndata: {json.dumps(change)}\n\n".encode()
                seen = now
                if time.monotonic() - sent > BEAT:
                    sent = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(EVERY / 2)
        finally:
            self._listeners -= 1

    async def _watch(self) -> None:
        try:
            while self._listeners:
                began = time.monotonic()
                await self._check()
                # With many runs on a slow disk, checks take at most a tenth of the time.
                await asyncio.sleep(max(EVERY, 9 * (time.monotonic() - began)))
        finally:
            self._task = None

    async def _check(self) -> None:
        self._now = await asyncio.to_thread(lambda: (self._library.signatures(), self._library.plans_signature()))


def changes(before: Signatures | None, now: Signatures) -> list[dict[str, Any]]:
    """What a page has to load again: the list, where a run or a plan has come or gone, and the runs that changed.

    >>> changes(({"a": "1", "b": "1"}, ""), ({"a": "2", "b": "1"}, ""))
    [{'run': 'a'}]
    """
    runs, plans = before or ({}, "")
    is_listed = before is None or runs.keys() != now[0].keys() or plans != now[1]
    changed = [{"run": name} for name, signature in now[0].items() if runs.get(name) != signature]
    return [{"runs": True}, *changed] if is_listed else changed


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address; ConfigError with a remedy where that fails."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as problem:
        raise ConfigError(f"--host {host}: there is no such address ({problem}); use 127.0.0.1 or 0.0.0.0") from None
    try:
        return socket.create_server(place, family=family, backlog=128)
    except OSError as problem:
        remedy = REMEDIES.get(problem.errno or 0) or problem.strerror or os.strerror(problem.errno or 0)
        raise ConfigError(f"cannot listen on {host}, port {port}: {remedy}") from None


REMEDIES = {
    errno.EADDRINUSE: "another program listens there; use another --port (0: any that is free), or end that program",
    errno.EACCES: "only the administrator may; use a --port from 1024 on",
    errno.EADDRNOTAVAIL: "this machine has no such address; use 127.0.0.1, or 0.0.0.0 for all that it has",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address that a socket listens on."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def address(host: str, listener: socket.socket, token: str | None) -> str:
    """The address to open; for a socket that listens on all addresses, with the name of this machine."""
    at, port = listener.getsockname()[:2]
    name = socket.gethostname() if ipaddress.ip_address(at.partition("%")[0]).is_unspecified else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")


def make_server(listener: socket.socket, library: Library, token: str | None = None) -> uvicorn.Server:
    """A server for a socket; it ends when `should_exit` is set."""
    at, port = listener.getsockname()[:2]
    hosts = (*LOCAL_HOSTS, at) if is_loopback(at) else ("*",)
    app = make_app(library, hosts, lambda: server.should_exit)
    guarded = Guard(app, token, f"weft-token-{port}")  # cookies hold for all ports of a host
    server = uvicorn.Server(
        uvicorn.Config(guarded, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=3)
    )
    return server

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
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

from weft.errors import ConfigError, WeftError, install_extra
from weft.serve.library import Library, NotFound
from weft.serve.report import page_files

if TYPE_CHECKING:
    import uvicorn
    from fastapi import Request, Response

log = logging.getLogger("weft.serve")

LOCAL_HOSTS = ("localhost", "*.localhost", "127.0.0.1", "[::1]")
"""The names of this machine."""


def make_app(
    library: Library,
    token: str | None = None,
    *,
    hosts: Sequence[str] = LOCAL_HOSTS,
    cookie: str = "weft-token",
    closing: Callable[[], bool] = lambda: False,
) -> App:
    """The ASGI application.

    It answers only requests to one of `hosts`: a foreign page that had its name lead here (DNS rebinding) sends its
    own. Streams end once `closing` is true.
    """
    require_serve()
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import BaseRoute, Route

    changes = Changes(library)

    def document(request: Request) -> Response:
        address = tuple(request.path_params["address"].split("/"))
        try:
            found = library.get(address, dict(request.query_params))
        except NotFound as problem:
            return JSONResponse({"error": _line(problem)}, 404)
        except (WeftError, OSError) as problem:
            return JSONResponse({"error": _line(problem)}, 422)
        except Exception as problem:
            log.exception("'%s' cannot be shown", request.url.path)
            return JSONResponse({"error": f"{type(problem).__name__}: {_line(problem)}"}, 500)
        return _tagged(request, found.body, found.tag, "application/json")

    async def stream(request: Request) -> Response:
        given = request.headers.get("last-event-id", "")
        last = int(given) if given.isascii() and given.isdigit() and len(given) < 20 else None
        return StreamingResponse(changes.listen(last, closing), media_type="text/event-stream")

    def page(request: Request) -> Response:
        name = request.path_params["name"]
        file = page_files().get(name or "index.html")
        if file is None:
            return JSONResponse({"error": f"there is nothing at '/{name}'"}, 404)
        body, kind = file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return _tagged(request, body, hashlib.sha256(body).hexdigest()[:32], kind)

    routes: list[BaseRoute] = [
        Route("/api/stream", stream),
        Route("/api/{address:path}", document),
        Route("/{name:path}", page),
    ]
    app = FastAPI(routes=routes, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    return Guard(app, token, cookie)


def require_serve() -> None:
    """Raises ConfigError that names the extra where the packages of the server are not installed."""
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise ConfigError(f"weft serve needs {package}: {install_extra('serve')}")


def _tagged(request: Request, body: bytes, tag: str, kind: str) -> Response:
    from fastapi import Response

    known = [word.strip().removeprefix("W/") for word in request.headers.get("if-none-match", "").split(",")]
    if f'"{tag}"' in known:
        return Response(status_code=304, headers={"etag": f'"{tag}"'})
    return Response(body, media_type=kind, headers={"etag": f'"{tag}"'})


def _line(problem: BaseException) -> str:
    return " ".join(str(problem).split())


Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

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

    app: App
    token: str | None = None
    cookie: str = "weft-token"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = query.pop("token", [""])[-1]
        more: list[tuple[str, str]] = []
        if scope["method"] not in ("GET", "HEAD"):
            await _answer(send, 405, "this server only shows: use GET", [("allow", "GET, HEAD")])
            return
        if self.token is None:
            pass
        elif _equal(given, self.token):
            secure = f"{self.cookie}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            more = [("set-cookie", secure)]
            if scope["path"] == "/":  # out of the address bar and the history
                place = "/?" + urlencode(query, doseq=True) if query else "/"
                await _answer(send, 303, "see /", [*more, ("location", place)])
                return
        elif not self._is_known(headers):
            await _answer(send, 401, "a token is needed: open the address that `weft serve` printed")
            return
        scope = {**scope, "query_string": urlencode(query, doseq=True).encode()}
        await self.app(scope, receive, _with(send, more))

    def _is_known(self, headers: Mapping[str, str]) -> bool:
        word, _, bearer = headers.get("authorization", "").partition(" ")
        if word.lower() == "bearer" and _equal(bearer.strip(), self.token):
            return True
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return False
        return found is not None and _equal(found.value, self.token)


def _equal(given: str, token: str | None) -> bool:
    return token is not None and hmac.compare_digest(given.encode(), token.encode())


def _with(send: Send, more: list[tuple[str, str]]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            own = {name.lower() for name, _ in message.get("headers", ())}
            extra = [*((name, value) for name, value in HEADERS.items() if name.encode() not in own), *more]
            message["headers"] = [*message.get("headers", ()), *((n.encode(), v.encode()) for n, v in extra)]
        await send(message)

    return sending


async def _answer(send: Send, status: int, text: str, more: list[tuple[str, str]] | None = None) -> None:
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    sending = _with(send, more or [])
    await sending({"type": "http.response.start", "status": status, "headers": headers})
    await sending({"type": "http.response.body", "body": body})


EVERY = 0.5
"""Seconds between two checks of the files."""

BEAT = 15.0
"""Seconds of silence after which a comment is sent, so that the connection stays open."""

LATEST = 1000
"""The most changes that are kept."""


class Changes:
    """Numbered changes; while anybody listens, one task checks the files for all listeners.

    Numbers begin at the milliseconds of the clock, so those of a server that was started again are greater than any
    that its listeners know.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._next = int(time.time() * 1000)
        self._latest: deque[tuple[int, dict[str, Any]]] = deque(maxlen=LATEST)
        self._signatures: dict[str, str] | None = None
        self._plans = ""
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None

    def record(self, found: dict[str, str], plans: str) -> None:
        """Number the changes since the last call, from the signatures of the runs and the plans."""
        if self._signatures is not None:
            if found.keys() != self._signatures.keys() or plans != self._plans:
                self._add({"runs": True})
            for name, signature in found.items():
                if self._signatures.get(name) != signature:
                    self._add({"run": name, "revision": self._library.revision(name, signature)})
        self._signatures, self._plans = found, plans

    def since(self, last: int | None) -> list[tuple[int, dict[str, Any]]]:
        """The changes after a number; all runs without a number, or where it is too old."""
        oldest = self._latest[0][0] if self._latest else self._next
        if last is not None and oldest - 1 <= last < self._next:
            return [change for change in self._latest if change[0] > last]
        now = self._next - 1
        runs: list[dict[str, Any]] = [{"runs": True}]
        runs += [
            {"run": name, "revision": self._library.revision(name, at)} for name, at in (self._signatures or {}).items()
        ]
        return [(now, change) for change in runs]

    async def listen(self, last: int | None, closing: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events, until the server closes or the listener leaves."""
        self._listeners += 1
        try:
            if self._task is None:
                await self._check()
                self._task = self._task or asyncio.create_task(self._watch())
            yield b"retry: 2000\n\n"
            sent = time.monotonic()
            while not closing():
                for at, change in self.since(last):
                    last, sent = at, time.monotonic()
                    yield _event(at, change)
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
        self.record(*await asyncio.to_thread(lambda: (self._library.signatures(), self._library.plans_signature())))

    def _add(self, change: dict[str, Any]) -> None:
        self._latest.append((self._next, change))
        self._next += 1


def _event(at: int, change: dict[str, Any]) -> bytes:
    return f"event: changed\nid: {at}\ndata: {json.dumps(change)}\n\n".encode()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address; ConfigError with a remedy where that fails."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as problem:
        raise ConfigError(f"--host {host}: there is no such address ({problem}); use 127.0.0.1 or 0.0.0.0") from None
    found = socket.socket(family, kind, protocol)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        found.listen(128)
    except OSError as problem:
        found.close()
        raise ConfigError(f"cannot listen on {host}, port {port}: {_remedy(problem)}") from None
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address that a socket listens on."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def address(host: str, listener: socket.socket, token: str | None) -> str:
    """The address to open; for a socket that listens on all addresses, with the name of this machine."""
    at, port = listener.getsockname()[:2]
    name = socket.gethostname() if ipaddress.ip_address(at.partition("%")[0]).is_unspecified else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")


def serve_on(listener: socket.socket, library: Library, token: str | None) -> None:
    """Serve until Ctrl-C or another signal ends the process."""
    try:
        make_server(listener, library, token).run(sockets=[listener])
    except KeyboardInterrupt:  # which uvicorn passes on when all is closed
        pass
    finally:
        listener.close()


def make_server(listener: socket.socket, library: Library, token: str | None = None) -> uvicorn.Server:
    """A server for a socket; it ends when `should_exit` is set."""
    import uvicorn

    at, port = listener.getsockname()[:2]
    app = make_app(
        library,
        token,
        hosts=(*LOCAL_HOSTS, at) if is_loopback(at) else ("*",),
        cookie=f"weft-token-{port}",  # cookies hold for all ports of a host
        closing=lambda: server.should_exit,
    )
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, server_header=False, timeout_graceful_shutdown=3)
    )
    return server


def _remedy(problem: OSError) -> str:
    if problem.errno == errno.EADDRINUSE:
        return "another program listens there; use another --port (0: any that is free), or end that program"
    if problem.errno == errno.EACCES:
        return "only the administrator may; use a --port from 1024 on"
    if problem.errno == errno.EADDRNOTAVAIL:
        return "this machine has no such address; use 127.0.0.1, or 0.0.0.0 for all that it has"
    return problem.strerror or os.strerror(problem.errno or 0)

"""Who may ask, and what a browser may do with the answer: hosts, tokens and headers, before any route is looked at."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode

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
    """An ASGI application around another one.

    With a token, nothing is answered without it: as `Authorization: Bearer`, as the cookie, or once as `?token=`, which
    sets the cookie. Where `local`, only requests to a name of this machine are answered: a page elsewhere whose name is
    made to lead here (DNS rebinding) says its own name.
    """

    app: App
    token: str | None = None
    local: bool = True
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
        if self.local and not is_here(headers.get("host", "")):
            await _answer(send, 421, "this server answers only to a name of its own machine, such as localhost")
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


def is_here(host: str) -> bool:
    """Whether a Host header names this machine itself.

    >>> [is_here(host) for host in ("localhost:8765", "127.0.0.1", "[::1]:80", "weft.example", "127.0.0.1.example")]
    [True, True, True, False, False]
    """
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower().rstrip(".") == "localhost" or name.lower().endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


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

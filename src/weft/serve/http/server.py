"""The process that serves: a socket that listens, and uvicorn on it until somebody ends it."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.serve.http.app import make_app
from weft.serve.library import Library

if TYPE_CHECKING:
    import uvicorn


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; `ConfigError` that says what to do where it cannot."""
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
    """What a person opens. A socket that listens everywhere is found under the name of this machine."""
    at, port = listener.getsockname()[:2]
    name = socket.gethostname() if ipaddress.ip_address(at.partition("%")[0]).is_unspecified else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/" + (f"?token={token}" if token else "")


def serve_on(listener: socket.socket, library: Library, token: str | None) -> None:
    """Serve until the process is told to end, by Ctrl-C or otherwise."""
    try:
        make_server(listener, library, token).run(sockets=[listener])
    except KeyboardInterrupt:  # which uvicorn passes on when all is closed
        pass
    finally:
        listener.close()


def make_server(listener: socket.socket, library: Library, token: str | None = None) -> uvicorn.Server:
    """A server for this socket, which ends when `should_exit` is set."""
    import uvicorn

    at, port = listener.getsockname()[:2]
    app = make_app(
        library,
        token,
        local=is_loopback(at),
        cookie=f"weft-token-{port}",  # cookies know no ports, and there may be another server on another
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

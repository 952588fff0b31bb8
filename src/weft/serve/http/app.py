"""The server: documents, the stream of changes and the page, over HTTP, to look at and never to change."""

from __future__ import annotations

import hashlib
import logging
import mimetypes
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from weft.errors import ConfigError, WeftError
from weft.serve.documents import Absent
from weft.serve.http.guard import App, Guard
from weft.serve.http.stream import Changes
from weft.serve.library import Library
from weft.serve.pagefiles import page_files

if TYPE_CHECKING:
    from fastapi import Request, Response


log = logging.getLogger("weft.serve")


def make_app(
    library: Library,
    token: str | None = None,
    *,
    local: bool = True,
    cookie: str = "weft-token",
    closing: Callable[[], bool] = lambda: False,
    every: float = 0.5,
) -> App:
    """The ASGI application.

    `local` says that it listens on loopback alone, `closing` that the server is about to end, and streams with it.
    """
    require_serve()
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse, StreamingResponse
    from starlette.routing import BaseRoute, Route

    changes = Changes(library, every)

    def document(request: Request) -> Response:
        address = tuple(request.path_params["address"].split("/"))
        try:
            found = library.get(address, dict(request.query_params))
        except Absent as problem:
            return JSONResponse({"error": _line(problem)}, 404)
        except (WeftError, OSError) as problem:
            return JSONResponse({"error": _line(problem)}, 422)
        except Exception as problem:
            log.exception("'%s' cannot be shown", request.url.path)
            return JSONResponse({"error": f"{type(problem).__name__}: {_line(problem)}"}, 500)
        return _tagged(request, found.body, found.tag, "application/json")

    async def stream(request: Request) -> Response:
        said = request.headers.get("last-event-id", "")
        last = int(said) if said.isascii() and said.isdigit() and len(said) < 20 else None
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
    return Guard(app, token, local, cookie)


def require_serve() -> None:
    """`ConfigError` that names the extra, unless the packages of the server are there."""
    for package in ("fastapi", "uvicorn"):
        if find_spec(package) is None:
            raise ConfigError(f"weft serve needs {package}: pip install 'weft[serve]'")


def _tagged(request: Request, body: bytes, tag: str, kind: str) -> Response:
    from fastapi import Response

    known = [word.strip().removeprefix("W/") for word in request.headers.get("if-none-match", "").split(",")]
    if f'"{tag}"' in known:
        return Response(status_code=304, headers={"etag": f'"{tag}"'})
    return Response(body, media_type=kind, headers={"etag": f'"{tag}"'})


def _line(problem: BaseException) -> str:
    return " ".join(str(problem).split())

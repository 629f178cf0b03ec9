"""The server of the page: status and dead letters as JSON, the topology as SVG, and replays.

The values of the status come from `ackcore.spark.inspect.status`; ``page.js`` shows them.

Checkpoints are read at most every 2 seconds, for any number of viewers, and only while a browser
shows them, so that the query is not slowed down.

Every page in a browser can send requests to a server on localhost and, through a name that is later
resolved to 127.0.0.1 (DNS rebinding), read the answers. Therefore the Host header must be one of
the known names, and requests that change something must come from our own page, with a token. An
address in the Host header cannot be rebound, so a server that listens at all addresses accepts any.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from ipaddress import ip_address
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ackcore._arrow.shown import readable
from ackcore.spark.base.errors import CheckpointCorrupt, StateError
from ackcore.spark.dead_letters.checkpoints import opened_checkpoint, store_of
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, list_letters, none_found
from ackcore.spark.dead_letters.replay import replay
from ackcore.spark.inspect.reason_counts import AGES_MS, DeadCounter
from ackcore.spark.inspect.status import CheckpointStatus, read_status
from ackcore.topology.explain import draw

_LOCAL = ("localhost", "127.0.0.1", "[::1]")
#: Addresses that stand for all addresses of this machine.
_ALL = ("", "0.0.0.0", "::")
_EVERY_S = 2.0
_BATCHES = 120
_MOST_LETTERS = 500
#: The maximum number of characters of a record in the list.
_MOST_CHARS = 20_000
_FILES = {"page.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}
_WAYS_OUT = {
    errno.EADDRINUSE: "Set another port, or 0 for any free one",
    errno.EACCES: "Set a port from 1024 on, or 0 for any free one",
}
_OF_HOSTS = "host must be an address of this machine: '127.0.0.1', or '0.0.0.0' for all"
#: The page loads only our own files, and no other page can show it in a frame.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Watched:
    """A checkpoint that the page shows, and its last status.

    Raises FileNotFoundError if there is no checkpoint at ``path``.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = opened_checkpoint(path).url
        self._lock = threading.Lock()
        self._dead = DeadCounter()
        self._read_at = float("-inf")
        self._status: CheckpointStatus | None = None

    def status(self) -> CheckpointStatus:
        """Return the query's status, at most 2 seconds old.

        Raises FileNotFoundError or StateError if the checkpoint cannot be read.
        """
        with self._lock:
            if self._status is None or time.monotonic() - self._read_at >= _EVERY_S:
                self._status = read_status(self.path, batches=_BATCHES, dead=self._dead)
                self._read_at = time.monotonic()
            return self._status


def _emitted(status: CheckpointStatus) -> Mapping[str, Mapping[str, int]]:
    """Return the number of tuples emitted in a status's micro-batches, by component and stream."""
    total: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for each in status.batches:
        for component, streams in each.progress.emitted.items():
            total[component].update(streams)
    return total


def make_app(
    checkpoints: Sequence[str | os.PathLike[str]],
    *,
    token: str | None,
    hosts: Sequence[str],
    any_address: bool,
) -> Starlette:
    """Return the ASGI application of the page and its requests.

    Raises FileNotFoundError if one of the paths is not a checkpoint.

    ``token``: the token that allows replays. Without a token, replays are disabled. ``hosts``:
    accepted host names of the server, beside localhost and its addresses. ``any_address``: whether
    any IP address is accepted as well, for a server that listens at all addresses.
    """
    watched = [Watched(path) for path in checkpoints]

    def asked(request: Request) -> Watched:
        return watched[int(request.path_params["n"])]

    async def listed(request: Request) -> Response:
        names = [each.path for each in watched]
        return JSONResponse({"checkpoints": names, "replay": token is not None})

    async def status(request: Request) -> Response:
        found = await run_in_threadpool(asked(request).status)
        return JSONResponse({**found.to_json(), "ages_ms": AGES_MS})

    async def topology(request: Request) -> Response:
        found = await run_in_threadpool(asked(request).status)
        svg = draw(found.structure, _emitted(found))
        policy = "default-src 'none'; style-src 'unsafe-inline'"
        headers = {"Content-Security-Policy": policy}
        return Response(svg, media_type="image/svg+xml", headers=headers)

    async def letters(request: Request) -> Response:
        wanted, limit = _filter_of(request.query_params)
        path = asked(request).path
        found = await run_in_threadpool(lambda: _letters(path, wanted, limit))
        return JSONResponse({**found, "limit": limit})

    async def replayed(request: Request) -> Response:
        if token is None:
            return JSONResponse(
                {"error": "replays are disabled; start the page with --allow-replay"}, 403
            )
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # In constant time, which tells nothing about the token.
        right = hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())
        if scheme.lower() != "bearer" or not right:
            said = "the token is wrong: it is in ACKCORE_UI_TOKEN, or ackcore ui printed it"
            return JSONResponse({"error": said}, 401)
        try:
            body = json.loads(await request.body())
            ids = tuple(LetterId.of(str(each)) for each in body["letters"])
        except (ValueError, TypeError, KeyError) as error:
            return JSONResponse(
                {"error": f"letters must be a list of names of dead letters: {error}"}, 400
            )
        if not ids:
            return JSONResponse({"error": "letters must have at least one name"}, 400)
        path, dry_run = asked(request).path, bool(body.get("dry_run", False))
        wanted = LetterFilter(ids)
        done = await run_in_threadpool(lambda: replay(path, where=wanted, dry_run=dry_run))
        told = {"request": done.request, "records": done.records}
        return JSONResponse({**told, "left_out": dict(done.left_out)})

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", "page.html")
        if name == "favicon.ico":
            return Response(status_code=204)
        if name not in _FILES:
            return JSONResponse({"error": "no such file"}, 404)
        text = files("ackcore.ui").joinpath(name).read_text(encoding="utf-8")
        return Response(text, media_type=_FILES[name])

    async def absent(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": "no checkpoint has this number"}, 404)

    async def failed(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 503)

    async def refused(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    return Starlette(
        routes=[
            Route("/", file),
            Route("/api/checkpoints", listed),
            Route("/api/{n:int}/status", status),
            Route("/api/{n:int}/topology.svg", topology),
            Route("/api/{n:int}/letters", letters),
            Route("/api/{n:int}/replay", replayed, methods=["POST"]),
            Route("/{name:str}", file),
        ],
        middleware=[Middleware(Guard, hosts=(*_LOCAL, *hosts), any_address=any_address)],
        exception_handlers={
            IndexError: absent,
            StateError: failed,
            OSError: failed,
            ValueError: refused,
        },
    )


def _filter_of(asked: Mapping[str, str]) -> tuple[LetterFilter, int]:
    since, until = (asked.get(name) for name in ("since_ms", "until_ms"))
    wanted = LetterFilter(
        spout=asked.get("spout") or None,
        component=asked.get("component") or None,
        error_type=asked.get("error") or None,
        message=asked.get("message") or None,
        since_ms=int(since) if since else None,
        until_ms=int(until) if until else None,
        sent={"yes": True, "no": False}.get(asked.get("sent", "")),
    )
    return wanted, min(max(int(asked.get("limit") or 50), 1), _MOST_LETTERS)


def _letters(path: str, wanted: LetterFilter, limit: int) -> dict[str, Any]:
    found = []
    damaged: list[CheckpointCorrupt] = []
    store = store_of(path)
    for letter in list_letters(
        store, wanted, limit, payload=True, damaged=damaged, binary=readable
    ):
        record = letter.payload or ""
        cut = f"{record[:_MOST_CHARS]} …" if len(record) > _MOST_CHARS else record
        found.append({**asdict(letter), "id": str(letter.id), "payload": cut})
    none = {} if found else {"none_found": none_found(store)}
    return {"letters": found, "damaged": list(map(str, damaged)), **none}


class PageServer:
    """A server of the page for some checkpoints, in a thread of this process until it is closed.

    ``host``: the address to listen at; ``"0.0.0.0"`` for all addresses of this machine. ``port``:
    the port, 0 for any free one. ``token``, ``hosts``: those of `make_app`. Raises
    FileNotFoundError if there is no checkpoint at a path, and OSError if the address cannot be
    bound.
    """

    def __init__(
        self,
        checkpoints: Sequence[str | os.PathLike[str]],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        hosts: Sequence[str] = (),
    ):
        name = f"[{host}]" if ":" in host else host
        app = make_app(checkpoints, token=token, hosts=(name, *hosts), any_address=host in _ALL)
        # The answers are small: a second suffices for open requests when the server stops.
        config = uvicorn.Config(
            app,
            host=host,
            port=port,
            log_level="warning",
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Bound here, because uvicorn would end the process if the port is taken.
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise OSError(
                error.errno,
                f"the page cannot be served at {host}:{port}: {error.strerror}. "
                f"{_WAYS_OUT.get(error.errno or 0, _OF_HOSTS)}",
            ) from error
        self._socket.listen()  # connections before the thread runs are queued
        self._server = uvicorn.Server(config)
        #: The URL of the page.
        self.url = f"http://{name}:{self._socket.getsockname()[1]}/"
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="ackcore-ui", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until the server is closed; Ctrl-C raises KeyboardInterrupt."""
        self._thread.join()

    def close(self) -> None:
        """Stop the server, and wait until it has ended. A second call does nothing."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> PageServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Guard:
    """A middleware that refuses requests of other web pages, and passes the others on to ``app``.

    To each response it adds headers that isolate the page in the browser.

    ``hosts``: the server's host names, without the port; IPv6 addresses in brackets.
    ``any_address``: whether any IP address is accepted as well.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], any_address: bool):
        self._app = app
        self._any_address = any_address
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request with status 403, or let the application answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        wrong = self._problem(scope["method"], Headers(scope=scope))
        if wrong is None:
            await self._app(scope, receive, guarded)
        else:
            await JSONResponse({"error": wrong}, 403)(scope, receive, guarded)

    def _problem(self, method: str, headers: Headers) -> str | None:
        host = headers.get("host", "")
        name = _name_of(host)
        if name not in self._hosts and not (self._any_address and _is_address(name)):
            return (
                f"the Host header names {name!r}, which is no known name of this server; start the "
                "page with --known-as NAME"
            )
        if method in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return "the request comes from a page of another server"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "the request comes from a page of another server"
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return "the request must be application/json"
        return None


def _name_of(host: str) -> str:
    """Return the name in a Host header, in lower case and without the port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _is_address(name: str) -> bool:
    bracketed = name.startswith("[") and name.endswith("]")
    try:
        # An IPv6 address is in brackets, an IPv4 address is not.
        return (ip_address(name[1:-1] if bracketed else name).version == 6) == bracketed
    except ValueError:
        return False

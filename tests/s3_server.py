"""A real S3 server: moto, in a process of its own; and a proxy before it that fails as S3 may.

Where moto is not installed, tests that ask for one are skipped with the reason; with
``ACKCORE_REQUIRE_S3=1`` they fail.
"""

from __future__ import annotations

import http.client
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any, NamedTuple

_numbers = itertools.count()


class Unavailable(RuntimeError):
    """No server can run here."""


class Endpoint:
    """A server that listens on ``port``; `new_bucket` makes what a test works in."""

    port: int
    #: How the names of buckets begin: no two servers have one of the same name.
    prefix: str

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def new_bucket(self) -> str:
        """Make a bucket, and return its name."""
        name = f"{self.prefix}-{next(_numbers)}"
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(request).close()
        return name


class S3Server(Endpoint):
    """moto."""

    prefix = "bucket"

    def __init__(self) -> None:
        if find_spec("moto") is None or find_spec("obstore") is None:
            raise Unavailable("an S3 server needs moto[server], and its client obstore")
        # It ends when its input does, however this process ends.
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable("moto did not start")
        self.port = int(line)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def environment(endpoint: str) -> dict[str, str]:
    """Return the environment of a process that is to reach a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "AKIAACKCORETEST",
        "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-tests",
        "AWS_REGION": "us-east-1",
    }


def store_of(endpoint: str, bucket: str) -> Any:
    """Return a client of a bucket."""
    from obstore.store import S3Store  # noqa: PLC0415 - an extra

    config = {name.lower(): value for name, value in environment(endpoint).items()}
    return S3Store(bucket, config=config)


def objects_of(endpoint: str, bucket: str, prefix: str) -> dict[str, bytes]:
    """All that is below a prefix, by key."""
    import obstore  # noqa: PLC0415 - an extra

    store = store_of(endpoint, bucket)
    keys = [entry["path"] for entry in obstore.list(store, prefix).collect()]
    return {key: bytes(obstore.get(store, key).bytes()) for key in keys}


class Request(NamedTuple):
    """The requests that a proxy received."""

    method: str
    path: str

    @property
    def is_list(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path


Which = Callable[[Request], bool]
#: What a fault does with a request.
LOST = "its answer is lost"
REFUSED = "its connection ends before it is read"
SLOW_DOWN = "503 SlowDown"
ERROR = "500 InternalError"
ERROR_AFTER = "500 InternalError, after it went through"
DENIED = "403 AccessDenied"
NO_UPLOAD = "404 NoSuchUpload"
COLLIDED = "409 ConditionalRequestConflict"
TOO_SLOW = "400 RequestTimeout"
NOT_DELETED = "200, with ServiceUnavailable for an object of a delete"
DENIED_DELETED = "200, with AccessDenied for an object of a delete"
BUSY_DELETED = "200, with OperationAborted for an object of a delete"


class FaultProxy:
    """A server before the server: it forwards one request at a time, but for the faults.

    One at a time, since moto looks at a condition and writes in two steps.

    Attributes
    ----------
    requests : list of Request
        All that came, those with faults among them.
    before : callable or None
        Called with each request before it is forwarded.
    lagging : bool
        Whether a list is answered as it was the last time, or as empty.
    server : S3Server or S3Proxy
        What it is before.
    endpoint : str
        Where it listens: on a port of its own, unless it is given a socket that listens.
    """

    def __init__(self, server: Any, listens: socket.socket | None = None) -> None:
        self.server = server
        self.requests: list[Request] = []
        self.before: Callable[[Request], object] | None = None
        self.lagging = False
        self._lists: dict[str, tuple[int, list[tuple[str, str]], bytes]] = {}
        self._faults: list[tuple[Which, str]] = []
        self._lock = threading.Lock()
        listens = listens or socket.create_server(("127.0.0.1", 0))
        address = listens.getsockname()
        self.endpoint = "http://{}:{}".format(*address)
        self._server = ThreadingHTTPServer(address, self._handler(), bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listens
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def fail(self, how: str, which: Which | str, times: int = 1) -> None:
        """Have the next ``times`` requests fail that are so, or have such a method."""
        wanted = (lambda one: one.method == which) if isinstance(which, str) else which
        self._faults += [(wanted, how)] * times

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _fault(self, request: Request) -> str | None:
        for place, (which, how) in enumerate(self._faults):
            if which(request):
                del self._faults[place]
                return how
        return None

    def _forward(
        self, request: Request, headers: dict[str, str], body: bytes
    ) -> tuple[int, list[tuple[str, str]], bytes]:
        if request.is_list and self.lagging:
            empty = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            return self._lists.get(request.path, (200, [], empty))
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        try:
            connection.request(request.method, request.path, body, headers)
            answer = connection.getresponse()
            # Of the answer to a HEAD it tells what a GET would have.
            keep = _KEPT | ({"content-length"} if request.method == "HEAD" else set())
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() in keep]
            found = answer.status, kept, answer.read()
        finally:
            connection.close()
        if request.is_list:
            self._lists[request.path] = found
        return found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                length = int(self.headers.get("Content-Length", 0))
                body = self.rfile.read(length)
                if len(body) < length:
                    self.close_connection = True  # given up amid it; the server would wait for more
                    return
                request = Request(self.command, self.path)
                proxy.requests.append(request)
                if proxy.before is not None:
                    proxy.before(request)  # which may ask the server, too
                with proxy._lock:
                    how = proxy._fault(request)
                    if how in _ANSWERS and how != ERROR_AFTER:
                        answer = _ANSWERS[how]
                    elif how == REFUSED:
                        answer = None
                    else:
                        answer = proxy._forward(request, dict(self.headers), body)
                    if how == ERROR_AFTER:
                        answer = _ANSWERS[how]
                if answer is None or how == LOST:
                    self.close_connection = True
                    return
                status, headers, data = answer
                self.send_response_only(status)
                for name, value in headers:
                    self.send_header(name, value)
                told = {name.lower(): value for name, value in headers}.get("content-length")
                if told is None or self.command != "HEAD":
                    self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _do

            def log_message(self, *_) -> None:
                """Say nothing."""

        return Handler


_KEPT = {"etag", "last-modified", "content-type", "content-range", "x-amz-version-id", "date"}


def _error(status: int, code: str) -> tuple[int, list[tuple[str, str]], bytes]:
    # S3 repeats what was signed, and by whom.
    body = f"<Error><Code>{code}</Code><AWSAccessKeyId>AKIAACKCORETEST</AWSAccessKeyId></Error>"
    return status, [("Content-Type", "application/xml")], body.encode()


def _left(code: str) -> tuple[int, list[tuple[str, str]], bytes]:
    error = f"<Error><Key>some/place/a</Key><Code>{code}</Code><Message>AKIA</Message></Error>"
    body = f"<DeleteResult>{error}</DeleteResult>"
    return 200, [("Content-Type", "application/xml")], body.encode()


_ANSWERS = {
    SLOW_DOWN: _error(503, "SlowDown"),
    ERROR: _error(500, "InternalError"),
    ERROR_AFTER: _error(500, "InternalError"),
    DENIED: _error(403, "AccessDenied"),
    NO_UPLOAD: _error(404, "NoSuchUpload"),
    COLLIDED: _error(409, "ConditionalRequestConflict"),
    TOO_SLOW: _error(400, "RequestTimeout"),
    NOT_DELETED: _left("ServiceUnavailable"),
    DENIED_DELETED: _left("AccessDenied"),
    BUSY_DELETED: _left("OperationAborted"),
}


def _serve() -> None:
    from moto.moto_server.werkzeug_app import MotoRequestHandler  # noqa: PLC0415
    from moto.server import create_backend_app  # noqa: PLC0415
    from werkzeug.serving import make_server  # noqa: PLC0415

    # moto's own, which it makes up where there are none.
    os.environ.update(environment("http://127.0.0.1"))
    logging.getLogger("werkzeug").disabled = True
    # Of S3 alone: moto's server for all services searches them for the one of each request.
    app = create_backend_app("s3")
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=MotoRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _serve()

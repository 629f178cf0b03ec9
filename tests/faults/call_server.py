"""A service that answers otherwise each time, and counts: a process of its own.

    python call_server.py DIRECTORY

A GET of ``/KEY?pid=N`` is answered with how often this key has been answered, this time included.
So who makes each call once gets 1 for all.  Keys that ``DIRECTORY/kill`` lists, one a line, have
the caller killed by SIGKILL when they are asked for the first time, and are not answered then.
The port is in ``DIRECTORY/port``; ``DIRECTORY/calls`` has a line ``begun KEY`` or ``answered KEY``
for each.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit


def serve(directory: Path) -> None:
    """Serve until the process is ended."""
    kill = {*(directory / "kill").read_text().split()}
    answered, lock = Counter[str](), threading.Lock()
    calls = open(directory / "calls", "a", buffering=1)  # noqa: SIM115 - as long as the process

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            key = parts.path[1:]
            with lock:
                calls.write(f"begun {key}\n")
                if key in kill:
                    kill.remove(key)
                    os.kill(int(parse_qs(parts.query)["pid"][0]), signal.SIGKILL)
                    return
                answered[key] += 1
                calls.write(f"answered {key}\n")
                body = str(answered[key]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    (directory / "port.new").write_text(str(server.server_port))
    (directory / "port.new").rename(directory / "port")
    server.serve_forever()


if __name__ == "__main__":
    serve(Path(sys.argv[1]))

"""PostgreSQL for its JDBC driver, which comes through Maven and speaks TCP alone.  No tests."""

from __future__ import annotations

import importlib
import socket
import socketserver
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


def jars_of_postgres():
    """Return Spark's setting of the driver's jars, or skip the test."""
    pytest.importorskip("confluent_kafka")  # by what downloads jars
    broker = importlib.import_module("broker")
    pom = Path(__file__).parent / "jdbc-pom.xml"
    try:
        found = broker.downloaded(pom, pom.parents[2] / "build" / "jdbc", "PostgreSQL's driver")
    except broker.Unavailable as error:
        pytest.skip(str(error))
    return ",".join(map(str, found.glob("*.jar")))


@contextmanager
def forwarded(path):
    """Yield a port of this host behind which a socket in the file system answers."""

    class Forward(socketserver.BaseRequestHandler):
        def handle(self):
            with socket.socket(socket.AF_UNIX) as to:
                to.connect(path)
                back = threading.Thread(target=pump, args=(to, self.request))
                back.start()
                pump(self.request, to)
                back.join()

    def pump(one, other):
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_WR)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Forward) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()

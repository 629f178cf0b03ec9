"""A real HDFS: a NameNode and a DataNode, each a process of its own, in one directory.

Its jars come through Maven, as `hdfs-pom.xml` names them, into ``build/hdfs-jars`` or where
``ACKCORE_HDFS_JARS`` says.  Where that cannot be, tests that ask for it are skipped with the
reason; with ``ACKCORE_REQUIRE_HDFS=1`` they fail.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from broker import Unavailable, downloaded, format_once, free_ports, java

__all__ = ["LosesAnswers", "MiniHdfs", "Unavailable"]

HERE = Path(__file__).parent
POM = HERE / "hdfs-pom.xml"

#: Longer than one takes to start, among other JVMs that do.
_START_S = 120.0
_JAVA = ["-XX:-UsePerfData", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx192m"]
_SERVER = "org.apache.hadoop.hdfs.server"
_LOCAL = "127.0.0.1:0"

_numbers = itertools.count()


class MiniHdfs:
    """One NameNode and one DataNode; `new_place` is what a test works in."""

    def __init__(self) -> None:
        if find_spec("hdfs_native") is None:
            raise Unavailable("HDFS needs its client, hdfs-native")
        default = HERE.parent / "build" / "hdfs-jars"
        self._jars = downloaded(POM, Path(os.environ.get("ACKCORE_HDFS_JARS", default)), "HDFS")
        self._java = java()
        self._place = tempfile.TemporaryDirectory(prefix="ackcore-hdfs-")
        self.host = f"127.0.0.1:{free_ports(1)[0]}"
        #: What HADOOP_CONF_DIR names, for Spark's own client.
        self.conf = Path(self._place.name, "conf")
        self.conf.mkdir()
        self._write_settings()
        self._processes: dict[str, subprocess.Popen] = {}
        self._starter = ThreadPoolExecutor(1)  # a thread that lives as long as this object
        try:
            self._format()
            for name in ("NameNode", "DataNode"):
                self.start(name)
            self.wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    def _write_settings(self) -> None:
        settings = {
            "fs.defaultFS": f"hdfs://{self.host}",
            "hadoop.tmp.dir": self._place.name,
            "dfs.namenode.name.dir": f"{self._place.name}/name",
            "dfs.datanode.data.dir": f"{self._place.name}/data",
            "dfs.replication": 1,
            # Else a NameNode waits for half a minute once all blocks are there.
            "dfs.namenode.safemode.extension": 0,
            "dfs.heartbeat.interval": 1,
            # A thread looks for blocks to delete: every 10 ms by default.
            "dfs.namenode.block.deletion.unlock.interval.ms": 1000,
            **dict.fromkeys(
                (
                    "dfs.namenode.http-address",
                    "dfs.datanode.address",
                    "dfs.datanode.http.address",
                    "dfs.datanode.ipc.address",
                ),
                _LOCAL,
            ),
        }
        lines = "".join(
            f"<property><name>{name}</name><value>{value}</value></property>\n"
            for name, value in settings.items()
        )
        for name in ("core-site.xml", "hdfs-site.xml"):
            (self.conf / name).write_text(f"<configuration>\n{lines}</configuration>\n")

    def _command(self, name: str) -> list[str]:
        path = f"{self.conf}:{self._jars}/*"
        return [self._java, *_JAVA, "-cp", path, f"{_SERVER}.{name.lower()}.{name}"]

    def _format(self) -> None:
        command = [*self._command("NameNode"), "-format", "-force", "-nonInteractive"]
        format_once(command, Path(self._place.name, "name"), self._jars / "formatted")

    def start(self, name: str) -> None:
        """Start "NameNode" or "DataNode", on what is in its directory."""
        self._starter.submit(self._launch, name).result()

    def _launch(self, name: str) -> None:
        setpriv = shutil.which("setpriv")  # it ends with the thread that started it
        with self._log(name).open("a") as log:
            self._processes[name] = subprocess.Popen(
                [*([setpriv, "--pdeathsig", "KILL"] if setpriv else []), *self._command(name)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _log(self, name: str) -> Path:
        return Path(self._place.name, f"{name}.log")

    def kill(self, name: str) -> None:
        """``kill -9``."""
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def restart(self, name: str) -> None:
        """``kill -9``, and start again."""
        self.kill(name)
        self.start(name)

    def send(self, name: str, what: signal.Signals) -> None:
        """Send a signal: SIGSTOP and SIGCONT let it stand still for a while."""
        self._processes[name].send_signal(what)

    def wait_until_it_answers(self) -> None:
        """Return once files can be written."""
        from hdfs_native import Client, WriteOptions  # noqa: PLC0415 - an extra

        client = Client(f"hdfs://{self.host}", {"dfs.client.failover.max.attempts": "0"})
        until = time.monotonic() + _START_S
        while True:
            try:
                client.create("/ready", WriteOptions(overwrite=True)).close()
                with client.create("/ready", WriteOptions(overwrite=True)) as file:
                    file.write(b"yes")  # which needs a DataNode
                return
            except (OSError, RuntimeError):
                if time.monotonic() > until:
                    raise
            for name, process in self._processes.items():
                assert process.poll() is None, self._log(name).read_text(errors="replace")[-2000:]
            time.sleep(0.1)

    def new_place(self) -> str:
        """The URL of a directory that a test has for itself, and that does not exist yet."""
        return f"hdfs://{self.host}/place-{next(_numbers)}/some/place"

    def close(self) -> None:
        for name in list(self._processes):
            self.kill(name)
        self._starter.shutdown()
        self._place.cleanup()


class LosesAnswers:
    """A proxy before the NameNode, which lets chosen requests through and loses their answers.

    Parameters
    ----------
    host : str
        The NameNode's host and port.
    """

    def __init__(self, host: str) -> None:
        self._host, self._port = host.split(":")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listening.getsockname()[1]}"
        #: Name of the method whose next answer is lost, and what is called once it was done.
        self.losing: tuple[bytes, Callable[[], object]] | None = None
        self.lost = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def lose(self, method: str, then: Callable[[], object] = lambda: None) -> None:
        """Lose the answer to the next request of a method, such as ``rename2``.

        ``then`` is called once the NameNode has done it, before the client meets the loss.
        """
        self.losing = method.encode(), then

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection((self._host, int(self._port)))
                except OSError:  # the NameNode is down
                    client.close()
                    continue
                is_losing = threading.Event()
                for ends in ((client, server), (server, client)):
                    arguments = (*ends, is_losing, ends[0] is client)
                    threading.Thread(target=self._pass, args=arguments, daemon=True).start()

    def _pass(
        self, here: socket.socket, there: socket.socket, is_losing: threading.Event, asks: bool
    ) -> None:
        then: Callable[[], object] = bool
        with suppress(OSError):
            while data := here.recv(1 << 16):
                # A request is sent in one piece, and names its method in plain text.
                if asks and self.losing is not None and self.losing[0] in data:
                    is_losing.set()
                elif not asks and is_losing.is_set() and self.losing is not None:
                    then, self.losing = self.losing[1], None
                    self.lost += 1
                    break
                there.sendall(data)
        then()
        for end in (here, there):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        here.close()  # the other thread closes the other one

    def close(self) -> None:
        self._listening.close()

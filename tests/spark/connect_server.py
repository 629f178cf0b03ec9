"""A Spark Connect server of its own process, on a port of its own, which may be killed.

    python connect_server.py

prints its port when it is ready, for each line that it is sent how many sessions it has ended, and
ends with its standard input.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CONF = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.connect.grpc.binding.address": "127.0.0.1",
    "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
}


class ConnectServer:
    """A server, running.

    Parameters
    ----------
    directory : Path
        For its log, and what else it writes.
    port : int, default 0
        Where it listens; 0 for any.
    conf : dict, optional
        Settings of Spark beside our own.
    """

    def __init__(self, directory, port=0, conf=None):
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "server.log"
        settings = {**CONF, "spark.connect.grpc.binding.port": str(port), **(conf or {})}
        arguments = [part for pair in settings.items() for part in ("--conf", "=".join(pair))]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                env={
                    **{k: v for k, v in os.environ.items() if "CONNECT_MODE" not in k},
                    "PYSPARK_PYTHON": sys.executable,
                    "PYSPARK_SUBMIT_ARGS": " ".join([*arguments, "pyspark-shell"]),
                },
                cwd=directory,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        said = self._process.stdout.readline().split()
        assert said, self.log.read_text(errors="replace")[-3000:]
        self.port = int(said[0])
        self.url = f"sc://127.0.0.1:{self.port}"

    def ended_sessions(self):
        """How many sessions it has ended."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def kill(self):
        """End it and its workers as a machine that stops does."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._process.poll() is None:
            self.kill()


def main():
    from pyspark.sql import SparkSession  # noqa: PLC0415

    spark = SparkSession.builder.master("local[2]").getOrCreate()
    service = "org.apache.spark.sql.connect.service.SparkConnectService$"
    of = spark._jvm.java.lang.Class.forName(service)
    connect = of.getField("MODULE$").get(None)
    print(connect.localPort(), flush=True)
    for _ in sys.stdin:
        print(connect.sessionManager().listClosedSessions().length(), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()

"""A second S3 server, for a second opinion: s3proxy, a JVM of its own, its objects in memory.

Its jars come through Maven, as `s3proxy-pom.xml` names them, into ``build/s3proxy-jars`` or where
``ACKCORE_S3PROXY_JARS`` says.  Where that cannot be, tests that ask for it are skipped with the
reason; with ``ACKCORE_REQUIRE_S3=1`` they fail.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from broker import Unavailable, downloaded, free_ports, java
from s3_server import Endpoint

__all__ = ["S3Proxy", "Unavailable"]

HERE = Path(__file__).parent
POM = HERE / "s3proxy-pom.xml"

#: Longer than one takes to start, among other JVMs that do.
_START_S = 90.0
_CONFIG = """
s3proxy.endpoint=http://127.0.0.1:{port}
s3proxy.authorization=none
jclouds.provider=transient-nio2
jclouds.identity=local
jclouds.credential=local
"""
# Else each request leaves dozens of lines.
_LOGBACK = '<configuration><root level="WARN"/></configuration>'


class S3Proxy(Endpoint):
    """s3proxy."""

    prefix = "second"  # stores are kept by URL

    def __init__(self) -> None:
        default = HERE.parent / "build" / "s3proxy-jars"
        directory = Path(os.environ.get("ACKCORE_S3PROXY_JARS", default))
        jars = downloaded(POM, directory, "s3proxy")
        self.port = free_ports(1)[0]
        self._place = tempfile.TemporaryDirectory(prefix="ackcore-s3proxy-")
        config, logging = (Path(self._place.name, name) for name in ("config", "logback.xml"))
        config.write_text(_CONFIG.format(port=self.port))
        logging.write_text(_LOGBACK)
        self._process = subprocess.Popen(
            [
                java(),
                "-XX:-UsePerfData",
                "-Xmx256m",
                f"-Dlogback.configurationFile={logging}",
                "-cp",
                f"{jars}/*",
                "org.gaul.s3proxy.Main",
                "--properties",
                str(config),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.close()
            raise

    def _wait_until_it_answers(self) -> None:
        until = time.monotonic() + _START_S
        while True:
            try:
                urllib.request.urlopen(self.endpoint, timeout=5).close()
                return
            except urllib.error.HTTPError:
                return  # it answers
            except OSError:
                pass
            assert self._process.poll() is None, "s3proxy ended as it started"
            assert time.monotonic() < until, "s3proxy does not answer"
            time.sleep(0.05)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._place.cleanup()

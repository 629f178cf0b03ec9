"""Run a command beside a real broker of its own: ``python with_broker.py command {} ...``.

``{}`` in the command is where the broker listens.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from broker import Broker


def main(command: list[str]) -> int:
    """Start a broker, run the command, and end the broker; return the command's exit status."""
    with tempfile.TemporaryDirectory(prefix="ackcore-kafka-") as directory:
        broker = Broker(Path(directory) / "broker").start()
        try:
            print(f"a broker listens at {broker.bootstrap_servers}", flush=True)
            where = broker.bootstrap_servers
            return subprocess.run([part.replace("{}", where) for part in command]).returncode
        finally:
            broker.kill()
            print("the broker is down", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["-h"], ["--help"]):
        print(__doc__)
    else:
        sys.exit(main(sys.argv[1:]))

"""A real PostgreSQL: a server of its own, in a folder of its own, that listens at a socket there.

Its programs are those of the system (Debian: ``apt-get install postgresql``).  Where there are
none, tests that ask for one are skipped with the reason; with ``ACKCORE_REQUIRE_POSTGRES=1`` they
fail.  It refuses to run as root, and is then run as ``postgres``, or ``nobody``.
"""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psycopg

_START_S = 60.0

_numbers = itertools.count()


def wait_until(holds, what: str) -> None:
    """Wait until ``holds()``, which another process brings about."""
    deadline = time.monotonic() + _START_S
    while not holds():
        assert time.monotonic() < deadline, f"not within {_START_S:.0f} s: {what}"
        time.sleep(0.02)


class Unavailable(RuntimeError):
    """No server can run here."""


def _program(name: str) -> str:
    """Return where one of PostgreSQL's programs is; Debian keeps them off the PATH."""
    found = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    if found is None and not places:
        raise Unavailable("a PostgreSQL needs its server; Debian: apt-get install postgresql")
    return found or str(places[-1])


def _user() -> pwd.struct_passwd | None:
    """Return the user to run it as, None if that is us."""
    if os.geteuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise Unavailable("PostgreSQL does not run as root, and there is no user postgres or nobody")


class PostgresServer:
    """A server; `new_database` makes what a test works in."""

    def __init__(self, port: int | None = None) -> None:
        #: Of this host's; it listens at its socket alone if there is none.
        self.port = port
        self._initdb, self._postgres = _program("initdb"), _program("postgres")
        self._as = _user()
        self._process: subprocess.Popen | None = None
        # pytest's own directories are closed to other users, and too long for a socket's name.
        self.directory = Path(tempfile.mkdtemp(prefix="ackcore-pg-"))
        self.own(self.directory)
        self.log = self.directory / "log"
        self._run([self._initdb, "-D", "data", "-U", "ackcore", "-A", "trust", "--no-sync"])

    def own(self, path: Path) -> None:
        """Give a path to the user that the server runs as."""
        if self._as is not None:
            os.chown(path, self._as.pw_uid, self._as.pw_gid)

    def _become(self) -> dict:
        if self._as is None:
            return {}
        return {"user": self._as.pw_uid, "group": self._as.pw_gid, "extra_groups": []}

    def _run(self, command: list[str]) -> None:
        environment = {**os.environ, "LC_ALL": "C.UTF-8", "HOME": str(self.directory)}
        ended = subprocess.run(
            command,
            cwd=self.directory,
            env=environment,
            capture_output=True,
            text=True,
            **self._become(),
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr

    def start(self) -> PostgresServer:
        """Start it, on what is in its folder, and return it when it answers."""
        settings = {
            "listen_addresses": "127.0.0.1" if self.port else "",
            **({"port": self.port} if self.port else {}),
            "unix_socket_directories": self.directory,
            # A crash of the server alone loses nothing by that.
            "fsync": "off",
            "max_wal_size": "2GB",
            "log_min_messages": "warning",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        # It ends with the process that started it, however that ends.
        setpriv = shutil.which("setpriv")
        with_us = [setpriv, "--pdeathsig", "QUIT"] if setpriv else []
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*with_us, self._postgres, "-D", str(self.directory / "data"), *options],
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                **self._become(),
            )
        wait_until(self._answers, "the server answers")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"it did not start: {self.log.read_text()[-2000:]}"
        with suppress(psycopg.OperationalError):
            psycopg.connect(self.dsn("postgres")).close()
            return True
        return False

    def kill(self) -> None:
        """End it at once, as a crash does: what was not committed is undone at the next start."""
        self._end(signal.SIGQUIT)

    def remove(self) -> None:
        """End it, and remove its folder."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(timeout=30)

    def dsn(self, database: str, user: str = "ackcore") -> str:
        """Return how to connect."""
        port = f" port={self.port}" if self.port else ""
        return f"host={self.directory} dbname={database} user={user}{port}"

    def new_database(self) -> str:
        """Make a database that no other test has, and return how to connect to it."""
        name = f"db{next(_numbers)}"
        with psycopg.connect(self.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.dsn(name)

"""Azure's blob store on this machine: Azurite, its objects in memory.

It comes through npm, into ``build/azurite`` or where ``ACKCORE_AZURITE`` says.  Where that cannot
be, tests that ask for it are skipped with the reason; with ``ACKCORE_REQUIRE_S3=1`` they fail.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import hmac
import itertools
import os
import shutil
import subprocess
import urllib.request
from email.utils import formatdate
from pathlib import Path

VERSION = "3.35.0"
#: Azurite's one account; its key is the same everywhere.
ACCOUNT = "devstoreaccount1"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_LISTENS = "successfully listens on "

_numbers = itertools.count()


class Unavailable(RuntimeError):
    """No server can run here."""


class Azurite:
    """Azurite; `new_container` makes what a test works in."""

    def __init__(self) -> None:
        node = shutil.which("node")
        if node is None:
            raise Unavailable("Azurite needs Node, there is no node")
        self._process = subprocess.Popen(
            [
                node,
                str(_installed() / "node_modules/azurite/dist/src/blob/main.js"),
                *("--blobHost", "127.0.0.1", "--blobPort", "0"),
                *("--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry"),
                "--silent",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for line in self._process.stdout:
            if _LISTENS in line:
                self.endpoint = line.partition(_LISTENS)[2].strip()
                return
        self.close()
        raise Unavailable("Azurite did not start")

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that is to reach it."""
        return {"AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": self.endpoint}

    def new_container(self) -> str:
        """Make a container, and return its name."""
        name = f"container-{next(_numbers)}"
        about = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
        lines = [f"{header}:{value}" for header, value in about.items()]
        lines += [f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"]
        # Of the twelve headers that are signed without their names none is there.
        signed = "\n".join(["PUT", *[""] * 11, *lines]).encode()
        key = hmac.new(base64.b64decode(_KEY), signed, hashlib.sha256)
        about["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(key.digest()).decode()}"
        url = f"{self.endpoint}/{ACCOUNT}/{name}?restype=container"
        urllib.request.urlopen(urllib.request.Request(url, headers=about, method="PUT")).close()
        return name

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


def _installed() -> Path:
    """Return where Azurite is, installed once, or raise `Unavailable`."""
    default = Path(__file__).parents[1] / "build" / "azurite"
    directory = Path(os.environ.get("ACKCORE_AZURITE", default))
    complete = directory / "version"
    directory.mkdir(parents=True, exist_ok=True)
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if complete.exists() and complete.read_text() == VERSION:
            return directory
        npm = shutil.which("npm")
        if npm is None:
            raise Unavailable("Azurite comes through npm, there is no npm")
        command = [npm, "install", "--prefix", str(directory), "--ignore-scripts", "--no-save"]
        ended = subprocess.run([*command, f"azurite@{VERSION}"], capture_output=True, text=True)
        if ended.returncode:
            said = ended.stderr.strip().splitlines()
            raise Unavailable("npm could not install Azurite: " + " / ".join(said[:3]))
        complete.write_text(VERSION)
    return directory

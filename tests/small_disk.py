"""A small file system in memory, to be filled; only root may mount one, and not everywhere."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


class SmallDisk:
    """A file system that is mounted until it is removed; the test is skipped if it cannot be."""

    def __init__(self, path: Path, megabytes: int) -> None:
        self.path = path
        path.mkdir()
        self._mount(f"size={megabytes}m")

    def resize(self, megabytes: int) -> None:
        """Give it another size."""
        self._mount(f"remount,size={megabytes}m")

    def remove(self, *, lazily: bool = False) -> None:
        """Unmount it; lazily where a process that goes on has files open there."""
        subprocess.run(["umount", *(["--lazy"] if lazily else []), self.path], check=True)

    def _mount(self, options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            pytest.skip(f"no small disk can be mounted here: {ended.stderr.strip()}")

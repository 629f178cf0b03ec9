"""C and C++ for the benches: compiled on demand into build/bench, called through ctypes.

Without a compiler, or without the headers that a source includes, the bench that asks for it is
skipped, and says what was missing.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

HERE = Path(__file__).parent
BUILD = HERE.parent / "build" / "bench"

#: What is measured here runs here only: the peers get all that this processor offers.
FLAGS = ["-O3", "-march=native", "-fPIC", "-shared"]
LANGUAGES = {".c": ("CC", "cc", "-std=gnu11"), ".cpp": ("CXX", "c++", "-std=c++17")}


class Unavailable(Exception):
    """A peer cannot be had on this machine; the message says why."""


@functools.cache
def library(source: str, defines: Sequence[str] = (), libraries: Sequence[str] = ()) -> ctypes.CDLL:
    """The shared library of one source file of this folder."""
    path = HERE / source
    variable, default, standard = LANGUAGES[path.suffix]
    compiler = os.environ.get(variable, default)
    if shutil.which(compiler) is None:
        raise Unavailable(f"{source}: no compiler {compiler!r}")
    options = [standard, *FLAGS, *(f"-D{name}" for name in defines)]
    linked = [f"-l{name}" for name in libraries]
    text = path.read_bytes() + repr((compiler, options, linked, sysconfig.get_platform())).encode()
    built = BUILD / f"{path.stem}-{hashlib.sha256(text).hexdigest()[:12]}.so"
    if not built.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        partial = built.with_suffix(f".{os.getpid()}")
        command = [compiler, *options, str(path), "-o", str(partial), *linked]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            errors = [line for line in made.stderr.splitlines() if "error" in line]
            raise Unavailable(f"{source}: {(errors or ['does not compile'])[0].strip()}")
        partial.replace(built)
    return ctypes.CDLL(str(built))


def address(column: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    """Where a column lies, for a C function; the caller keeps the column."""
    assert column.flags.c_contiguous
    return ctypes.c_void_p(column.ctypes.data)

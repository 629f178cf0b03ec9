"""The address on which a server of this process listens, and errors of binding it."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

_WAYS_OUT = {
    errno.EADDRINUSE: "Set another port, or 0 for any free one",
    errno.EACCES: "Set a port from 1024 on, or 0 for any free one",
}
_OF_HOSTS = "host must be an address of this machine: '127.0.0.1', or '0.0.0.0' for all"


@contextmanager
def listening(what: str, host: str, port: int) -> Iterator[None]:
    """A context in which a server binds its address. Errors name the remedy.

    Raises TypeError or ValueError if the port is invalid. Raises OSError if the address cannot be
    bound.

    ``what``: the service, for errors. ``port``: the port, 0 for any free one.
    """
    if not isinstance(port, int) or isinstance(port, bool):
        raise TypeError(f"port must be an int, got {type(port).__name__}")
    if not 0 <= port <= 65535:
        raise ValueError(f"port must be in 1..65535, or 0 for any free one, got {port}")
    try:
        yield
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno or 0, _OF_HOSTS)
        said = f"{what} cannot be served at {host}:{port}: {error.strerror}. {way_out}"
        raise OSError(error.errno, said) from error

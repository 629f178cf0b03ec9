"""Functions that processes are given, which must be of a module."""

import os
import signal
import threading
from pathlib import Path

from ackcore.calls import Reject, Unavailable


def write(folder, record):
    """Leave a line, in one write, so that it survives whatever kills this."""
    with open(Path(folder) / f"{os.getpid()}.effects", "ab", buffering=0) as file:
        file.write(f"{record}\n".encode())


def write_or_die(folder, fatal, record):
    if record in fatal:
        os.kill(os.getpid(), signal.SIGKILL)
    write(folder, record)


def write_or_hang(folder, hangs, record):
    """Hang, the first time that it comes to these."""
    mark = Path(folder) / f"{record}.hung"
    if record in hangs and not mark.exists():
        mark.touch()
        threading.Event().wait()
    write(folder, record)


class NotLoaded:
    """An argument with which a process ends before it is ready, as long as there is a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return load, (self.path,)


def load(path):
    if Path(path).exists():
        os._exit(3)
    return NotLoaded(path)


class NeverLoaded:
    """An argument that hangs when a process unpickles it."""

    def __reduce__(self):
        return hang, ()


def hang():
    threading.Event().wait()


def die_or_return(argument, record):
    if record == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return record


def raise_or_return(record):
    if record == "unsendable":
        return threading.Lock()
    if record == "bad":
        raise ValueError("bad record")
    return None


class BadOrder(Reject):
    def __init__(self, order, why):
        super().__init__(f"order {order}: {why}")


class Away(Unavailable):
    def __init__(self, host, port):
        super().__init__(f"{host}:{port}", after_s=3)


class OneOrder(Reject):
    def __init__(self, order):
        super().__init__(f"order {order}")


class Plain(Exception):
    def __init__(self, order, why):
        super().__init__(f"order {order}: {why}")


class Panic(BaseException):
    """A panic in a Rust extension has no other base."""


def raise_own(record):
    if record == "panic":
        raise Panic("out of bounds")
    if record == "one":
        raise OneOrder(7)
    raise {"reject": BadOrder, "unavailable": Away, "other": Plain}[record](7, 8)


def effects(folder):
    """Return the written records, with duplicates."""
    files = sorted(Path(folder).glob("*.effects"))
    return [int(line) for file in files for line in file.read_text().splitlines()]

"""Fingerprints are the same from both backends, as defined, and so for ever."""

import threading

import numpy as np
import pytest
from definitions import ANY_BITS, fingerprint_of
from hypothesis import given
from hypothesis import strategies as st

from ackcore import _reference


@given(st.binary(max_size=100), ANY_BITS)
def test_fingerprints_are_as_defined(native, data, seed):
    wanted = fingerprint_of(data, seed)
    assert native.fingerprint(data, seed) == _reference.fingerprint(data, seed) == wanted


def test_fingerprints_never_change(backend):
    found = [backend.fingerprint(data) for data in (b"", b"\0", b"ackcore", bytes(range(256)))]
    assert [*found, backend.fingerprint(b"ackcore", -1)] == FINGERPRINTS


def test_fingerprints_of_long_data(backend):
    """Also over the twin's blocks, and from addresses that are no multiple of 8."""
    data = np.random.default_rng(1).bytes(2**18 + 2**18 + 13)
    wanted = fingerprint_of(data, 5)
    assert backend.fingerprint(data, 5) == wanted
    assert backend.fingerprint(memoryview(b"x" + data)[1:], 5) == wanted


def test_fingerprints_notice_accidents(backend):
    data = bytearray(np.random.default_rng(2).bytes(4096))
    seen = {backend.fingerprint(data), backend.fingerprint(data, 1), backend.fingerprint(data[:-1])}
    seen |= {backend.fingerprint(data + bytes(n)) for n in range(1, 17)}
    seen |= {backend.fingerprint(data[512:] + data[:512]), backend.fingerprint(data + data)}
    seen |= {backend.fingerprint(bytes(n)) for n in range(40)}
    changes = 4096
    for place in range(changes):
        data[place] ^= 1 << place % 8
        seen.add(backend.fingerprint(data))
        data[place] ^= 1 << place % 8
    assert len(seen) == 3 + 16 + 2 + 40 + changes


def test_fingerprints_of_any_buffer(backend):
    pa = pytest.importorskip("pyarrow")
    numbers = np.arange(12, dtype=np.int32)
    wanted = backend.fingerprint(numbers.tobytes())
    for data in (numbers, numbers.reshape(3, 4), memoryview(numbers), pa.py_buffer(numbers)):
        assert backend.fingerprint(data) == wanted
    assert (
        backend.fingerprint(np.empty(0))
        == backend.fingerprint(pa.py_buffer(b""))
        == FINGERPRINTS[0]
    )


def test_what_fingerprints_refuse(backend):
    with pytest.raises(TypeError, match="data must be bytes or another buffer, got str"):
        backend.fingerprint("text")
    with pytest.raises(ValueError, match="data must be C-contiguous"):
        backend.fingerprint(np.arange(9)[::3])
    with pytest.raises(TypeError, match="seed must be an integer"):
        backend.fingerprint(b"", 0.5)
    with pytest.raises(OverflowError, match="seed must fit in 64 bits"):
        backend.fingerprint(b"", 2**64)


def test_threads_do_not_disturb_each_other(native):
    """The loops run without the GIL."""
    data, found = np.arange(200_000), []

    def work():
        hashes = np.zeros(len(data), np.int64)
        native.hash_fixed(hashes, data, 8)
        found.append((native.fingerprint(data), native.fingerprint(hashes)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1


FINGERPRINTS = [
    5608870745677987462,
    3047026642955291612,
    8761221559836216189,
    653027024418767747,
    -1274325050204851155,
]

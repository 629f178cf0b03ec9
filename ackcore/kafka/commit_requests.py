"""The division of a commit into requests that a broker accepts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

_Key = TypeVar("_Key", bound=tuple[str, int])

#: A broker writes a request as one batch of records into its offsets topic.  By default that takes
#: at most 1 MiB; a larger batch fails with an unknown error.
_REQUEST_BYTES = 512 << 10
_RECORD_BYTES = 100  # besides the names and the metadata


def commit_requests(group: str, metadata: Mapping[_Key, str]) -> Iterator[list[_Key]]:
    """Yield the partitions of each request, given the metadata of each partition."""
    keys: list[_Key] = []
    size = 0
    for key, text in metadata.items():
        bytes_ = _RECORD_BYTES + len((group + key[0] + text).encode())
        if keys and size + bytes_ > _REQUEST_BYTES:
            yield keys
            keys, size = [], 0
        keys.append(key)
        size += bytes_
    if keys:
        yield keys

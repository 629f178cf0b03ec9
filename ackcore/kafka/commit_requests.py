"""The number of partitions' offsets in one commit request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

_Key = TypeVar("_Key", bound=tuple[str, int])

#: A request becomes one batch of records in a topic of Kafka's own, which takes at most 1 MiB by
#: default, and refuses more as an error that is unknown.
_REQUEST_BYTES = 512 << 10
_RECORD_BYTES = 100  # beside the names and the metadata


def commit_requests(group: str, metadata: Mapping[_Key, str]) -> Iterator[list[_Key]]:
    """Yield which partitions go into one request each, by the metadata of each."""
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

"""Tuples of many records, of which only the failed records are sent again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ackcore._error_hints import counted


class Batch(Sequence[Any]):
    """The records of one tuple, of which only the failed ones are sent again.

    If records fail one in a thousand times, almost a tenth of the tuples of 100 records fail. So a
    consumer answers with a bitmap, and `only` returns the records to send again.

    Parameters
    ----------
    records : sequence
        The records, kept unchanged.

    Raises
    ------
    ValueError
        If there are no records.
    """

    __slots__ = ("records",)

    def __init__(self, records: Sequence[Any]) -> None:
        if not len(records):
            raise ValueError("records must not be empty, got none; make no Batch of no records")
        self.records = records

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.records)

    def __repr__(self) -> str:
        return f"Batch({counted(len(self.records), 'record')})"

    def failed(self, bitmap: bytes | npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Return whether each record failed, from either form of a bitmap.

        Parameters
        ----------
        bitmap : bytes, or array or list of bool, shape (n,)
            Record i failed if item i is set. As bytes or an array of uint8: bit ``i % 8`` of byte
            ``i // 8`` (`numpy.packbits` with ``bitorder="little"``) of ``ceil(n / 8)`` bytes;
            further bits of the last byte are 0.

        Returns
        -------
        numpy.ndarray of bool, shape (n,)

        Raises
        ------
        TypeError
            If it is neither bytes nor boolean.
        ValueError
            If its length does not match this batch.
        """
        n = len(self.records)
        if isinstance(bitmap, (bytes, bytearray, memoryview)):
            bitmap = np.frombuffer(bitmap, np.uint8)
        if isinstance(bitmap, np.ndarray) and bitmap.dtype == np.uint8 and bitmap.ndim == 1:
            packed = bitmap
            bits = np.unpackbits(packed, bitorder="little")
            if len(packed) != -(-n // 8) or bits[n:].any():
                raise ValueError(
                    f"the bitmap of the failed ones of {n} records must have {-(-n // 8)} bytes "
                    f"and no bit beyond them, got {len(packed)} bytes and {int(bits[n:].sum())} "
                    "bits beyond; make it by numpy.packbits(failed, bitorder='little')"
                )
            return bits[:n].astype(np.bool_)
        found = np.asarray(bitmap)
        if found.dtype != np.bool_:
            raise TypeError(
                "the bitmap must be bytes (numpy.packbits(failed, bitorder='little')) or booleans, "
                f"got {found.dtype}; rows by number become one by: bits = numpy.zeros(n, bool); "
                "bits[rows] = True"
            )
        if found.shape != (n,):
            raise ValueError(
                f"the bitmap must have one item for each of the batch's {n} records, got shape "
                f"{found.shape}"
            )
        return found

    def only(self, failed: npt.NDArray[np.bool_]) -> Batch:
        """Return a new batch of the failed records, in order.

        Its records are a list, or the result of ``take(row numbers)`` if the records have it.

        Parameters
        ----------
        failed : array of bool, shape (n,)
            The result of `failed`, with at least one set.
        """
        places = np.flatnonzero(failed)
        take = getattr(self.records, "take", None)
        rest = [self.records[i] for i in places.tolist()] if take is None else take(places)
        return Batch(rest)

    def singles(self) -> list[Batch]:
        """Return one batch for each record, to find the record on which its consumer fails."""
        return [self.only(np.arange(len(self)) == i) for i in range(len(self))]

"""Columns of small numbers as bits, Rice coded.

The encoder writes bits as ASCII digits, a byte each, which can be joined like bytes. The decoder
reads them as arrays. A column of few numbers is coded with Python integers, because one numpy call
takes about as long as ten operations on them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ackcore._records import Int64s

#: Bits to read: an array of 0 and 1.
Bits = npt.NDArray[np.uint8]
#: Bits to write: the characters 0 and 1.
Digits = bytes

SIZE_BITS = 6
#: Replaces the Rice parameter of a column whose numbers are all 0; no bits follow.
ALL_ZERO = 63
#: A quotient of at least ESCAPE is written separately in FULL_BITS bits. Otherwise one jump of
#: 10**9 among small numbers would take 10**9 bits.
ESCAPE, FULL_BITS = 40, 63

#: The maximum length of a column that is coded with Python integers.
_FEW = 96
#: A sum of floats below this is exact, so that both ways of coding give the same bits.
_EXACT = 1 << 53
_UNARY = [b"0" * quotient + b"1" for quotient in range(ESCAPE + 1)]


class RiceNumbers:
    """Numbers of 0 or more, and the parameter of their shortest code."""

    def __init__(self, numbers: Int64s) -> None:
        self.numbers = numbers
        self.parameter, self.size = ALL_ZERO, SIZE_BITS
        self._few = numbers.tolist() if len(numbers) <= _FEW else None
        if self._few is not None and (total := sum(self._few)) < _EXACT:
            sizes = _sizes_of_few(self._few, total) if total else {}
        elif not numbers.any():
            sizes = {}
        else:
            sizes = {guess: _rice_bits(numbers, guess) for guess in _guesses(numbers)}
        if sizes:
            self.parameter = min(sizes, key=sizes.__getitem__)
            self.size += sizes[self.parameter]

    def first(self, n: int) -> RiceNumbers:
        """Return a column of the first n numbers."""
        return self if n == len(self.numbers) else RiceNumbers(self.numbers[:n])

    def bits(self) -> list[Digits]:
        """Return the parameter, the unary quotients, the remainders, and the escaped quotients."""
        parameter = self.parameter
        pieces = [field(parameter, SIZE_BITS)]
        if parameter == ALL_ZERO:
            return pieces
        if self._few is not None:
            quotients = [each >> parameter for each in self._few]
            pieces += [_UNARY[min(each, ESCAPE)] for each in quotients]
            if parameter:
                mask = (1 << parameter) - 1
                pieces += [field(each & mask, parameter) for each in self._few]
            return pieces + [field(each, FULL_BITS) for each in quotients if each >= ESCAPE]
        return [*pieces, *_bits_of_many(self.numbers, parameter)]


def _sizes_of_few(numbers: list[int], total: int) -> dict[int, int]:
    """Return the bits that the numbers take, by Rice parameter, for the parameters of `_guesses`.

    ``total``: the sum of the numbers, above 0.
    """
    n, most = len(numbers), max(numbers)
    typical = [int(total / n)]
    if most > 64 * typical[0]:
        ranked = sorted(numbers)
        typical.append((ranked[(n - 1) // 2] + ranked[n // 2]) // 2)
    found = {}
    for guess in _parameters(typical):
        quotients = [each >> guess for each in numbers]
        escaped = 0
        if most >> guess >= ESCAPE:
            escaped = sum(each >= ESCAPE for each in quotients)
            quotients = [min(each, ESCAPE) for each in quotients]
        found[guess] = sum(quotients) + n + guess * n + escaped * FULL_BITS
    return found


def _bits_of_many(numbers: Int64s, parameter: int) -> list[Digits]:
    quotients = numbers >> parameter
    escaped = quotients[quotients >= ESCAPE]
    stops = np.cumsum(np.minimum(quotients, ESCAPE) + 1) - 1
    unary = np.full(int(stops[-1]) + 1, ord("0"), np.uint8)
    unary[stops] = ord("1")
    remainders = fields(numbers & ((1 << parameter) - 1), parameter)
    return [unary.tobytes(), _digits(remainders), _digits(fields(escaped, FULL_BITS))]


def _guesses(numbers: Int64s) -> list[int]:
    """Return a few Rice parameters; one of them gives a shortest code."""
    typical = [int(numbers.mean())]
    if numbers.max() > 64 * typical[0]:
        typical.append(int(np.median(numbers)))  # a few are far above all others
    return _parameters(typical)


def _parameters(typical: list[int]) -> list[int]:
    return sorted({max(0, one.bit_length() - by) for one in typical for by in (1, 2)})


def _rice_bits(numbers: Int64s, parameter: int) -> int:
    quotients = numbers >> parameter
    escaped = int(np.count_nonzero(quotients >= ESCAPE))
    unary = int(np.minimum(quotients, ESCAPE).sum()) + len(numbers)
    return unary + parameter * len(numbers) + escaped * FULL_BITS


def fields(numbers: Int64s, width: int) -> Bits:
    """Return the lowest ``width`` bits of each number, joined; the highest bit first."""
    shifts = np.arange(width - 1, -1, -1, dtype=np.int64)
    return ((numbers[:, None] >> shifts) & 1).astype(np.uint8).ravel()


def _digits(bits: Bits) -> Digits:
    return (bits | ord("0")).tobytes()


def field(value: int, width: int) -> Digits:
    """Return the bits of a number, with zeros before them, as ``width`` digits."""
    return f"{value:0{width}b}".encode() if width else b""


def number(value: int) -> Digits:
    """Encode a number below 2**63 of unknown width: the width, then that many bits."""
    width = value.bit_length()
    return field(width, SIZE_BITS) + field(value, width)

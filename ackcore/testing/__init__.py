"""The contract of a ledger, as plain functions that run on any backend.

`check_backend` runs all of it; `CONTRACT` lists the cases.  Nothing here needs a test framework.
"""

from __future__ import annotations

from ackcore.testing import folding, inside, messages, refusals
from ackcore.testing.scripts import Case, Clock, Factory

__all__ = ["CONTRACT", "Case", "Clock", "Factory", "check_backend"]

#: Every case, in the order of SEMANTICS.
CONTRACT: tuple[Case, ...] = (
    *messages.CASES,
    *folding.CASES,
    *inside.CASES,
    *refusals.CASES,
)


def check_backend(factory: Factory) -> None:
    """Run the contract on a backend.

    Parameters
    ----------
    factory : callable
        Takes the arguments of `ackcore.Ledger` and returns a ledger: its class, for one.

    Raises
    ------
    AssertionError
        For the first case that does not hold; the message begins with the case's name.
    """
    for case in CONTRACT:
        try:
            case(factory)
        except AssertionError as error:
            raise AssertionError(f"{case.__name__}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{case.__name__}: raised {error!r}") from error

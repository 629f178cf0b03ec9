"""Tools for tests in any framework: topologies in this process, and a contract of ledgers.

`run` takes the records of a topology through it, without Spark, and returns what became of them.
`check_backend` runs the contract of a ledger on any backend; `CONTRACT` lists its cases.
"""

from __future__ import annotations

from ackcore.testing import folding, inside, messages, refusals
from ackcore.testing.results import DeadLetter, Source, TopologyRun
from ackcore.testing.scripts import Case, Clock, Factory
from ackcore.testing.topologies import run

__all__ = [
    "CONTRACT",
    "Case",
    "Clock",
    "DeadLetter",
    "Factory",
    "Source",
    "TopologyRun",
    "check_backend",
    "run",
]

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

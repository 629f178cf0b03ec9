"""The layout of a topology: the stage of each bolt, and the exchanges between them.

A DAG becomes a chain. Spouts are on level 1. A bolt is on the level of its furthest source, or one
level further if a grouping moves tuples between the two. All bolts of a level run in one stage, and
tuples pass between them within the task. One exchange joins levels k and k + 1, and carries every
stream that a later level reads. A stream that skips a level is passed through undecoded. So no
tuple is computed twice, or stored for a second reader.

No stream leads back to an earlier level, and each level but the first has a bolt. The layout is
independent of Spark, and deterministic: a topology has the same layout everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.parts import Grouping, Parts


@dataclass(frozen=True, slots=True)
class Subscription:
    """The subscription of one bolt to one stream (Storm's word)."""

    index: int  # its number, from 0, in the order of declaration. It tags packed tuples
    #: The component and its stream that the bolt reads.
    source: str
    stream: str
    target: str  # the bolt
    grouping: Grouping  # the assignment of tuples to tasks
    parallelism: int | None  # the requested number of tasks of the target
    #: The levels of source and target.
    level_from: int
    level_to: int

    @property
    def moves(self) -> bool:
        """Whether tuples pass an exchange, because the bolt is on a later level than the source.

        The bolt's level may be due to another input: then `spreads` may be false, and each tuple
        goes to the task with the number of the task that emitted it.
        """
        return self.level_to > self.level_from

    @property
    def spreads(self) -> bool:
        """Whether the grouping decides to which task each tuple goes."""
        return self.grouping.moves(self.parallelism)


@dataclass(frozen=True, eq=False)
class Layout:
    """The levels and subscriptions of a topology. It has no bolt objects: it is small to send."""

    #: The level of each component: 1 reads the source, k + 1 is behind k exchanges.
    levels: Mapping[str, int]
    #: The bolts, each after those it reads, and otherwise in the order of declaration.
    order: tuple[str, ...]
    subscriptions: tuple[Subscription, ...]  # the subscriptions, by index
    #: The component and name of each stream that a sink or a table reads.
    sinks: frozenset[tuple[str, str]]
    #: The components that need the identity of rows (message id, attempt, stable id): bolts that
    #: process single tuples, and everything upstream of them, which must pass it on.
    needs_identity: frozenset[str]
    checks_unique: bool  # whether the message ids of a spout must be checked for duplicates

    @classmethod
    def of(cls, topology: Parts) -> Layout:
        """Return the layout of a topology, which the builder has checked and which has no cycle."""
        order = _in_order(topology)
        levels = dict.fromkeys(topology.spouts, 1)
        for name in order:
            bolt = topology.bolts[name]
            levels[name] = max(
                levels[each.component] + each.grouping.moves(bolt.parallelism)
                for each in bolt.inputs
            )
        inputs = [(bolt.name, each) for bolt in topology.bolts.values() for each in bolt.inputs]
        needs_identity: set[str] = set()
        for bolt in (topology.bolts[name] for name in reversed(order)):
            if bolt.name in needs_identity or bolt.component.needs_identity:
                needs_identity.update((bolt.name, *(each.component for each in bolt.inputs)))
        return cls(
            # In the order of declaration, spouts first: a set's order differs between processes.
            levels={name: levels[name] for name in (*topology.spouts, *topology.bolts)},
            order=order,
            subscriptions=tuple(
                Subscription(
                    index,
                    each.component,
                    each.stream,
                    target,
                    each.grouping,
                    topology.bolts[target].parallelism,
                    levels[each.component],
                    levels[target],
                )
                for index, (target, each) in enumerate(inputs)
            ),
            sinks=topology.written,
            needs_identity=frozenset(needs_identity),
            checks_unique=any(spout.checks_ids for spout in topology.spouts.values()),
        )

    @property
    def depth(self) -> int:
        """The number of levels. Each runs as a stage, with an exchange to the next level."""
        return max(self.levels.values())

    @property
    def exchanges(self) -> int:
        """The number of exchanges between levels, without the one to the stage that settles."""
        return self.depth - 1

    @property
    def settles(self) -> bool:
        """Whether a last stage decides which records are ACKED, and finds duplicate message ids.

        It exists if there is an exchange or such ids must be found. Else each task decides for its
        own records.
        """
        return self.exchanges > 0 or self.checks_unique

    def at(self, level: int) -> tuple[str, ...]:
        """Return the names of the bolts behind ``level`` - 1 exchanges, each after those it reads.

        Returns () if there are none.
        """
        return tuple(name for name in self.order if self.levels[name] == level)

    def out(self, component: str, stream: str = DEFAULT_STREAM) -> tuple[Subscription, ...]:
        """Return the subscriptions of all bolts to a stream."""
        read = component, stream
        return tuple(sub for sub in self.subscriptions if (sub.source, sub.stream) == read)

    def into(self, component: str) -> tuple[Subscription, ...]:
        """Return the subscriptions of the bolt ``component`` to the streams that it reads."""
        return tuple(sub for sub in self.subscriptions if sub.target == component)

    def crossing(self, level: int) -> tuple[Subscription, ...]:
        """Return the subscriptions whose tuples pass the exchange between a level and the next.

        These include streams that skip the next level.
        """
        return tuple(sub for sub in self.subscriptions if sub.level_from <= level < sub.level_to)

    def sunk(self, component: str, stream: str = DEFAULT_STREAM) -> bool:
        """Return whether a sink or a table reads a stream."""
        return (component, stream) in self.sinks


def _in_order(topology: Parts) -> tuple[str, ...]:
    """Return the bolts' names, each after those it reads, and otherwise as they were declared."""
    left = {bolt.name: [each.component for each in bolt.inputs] for bolt in topology.bolts.values()}
    order: list[str] = []
    while left:
        order.append(next(name for name, reads in left.items() if left.keys().isdisjoint(reads)))
        del left[order[-1]]
    return tuple(order)

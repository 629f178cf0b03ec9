"""The layout of a topology: the stage of each bolt, and the exchanges between them.

A DAG becomes a chain.  Spouts are on level 1.  A bolt is on the level of its furthest source, or
one further on if a grouping moves tuples between the two; all bolts of a level run in one stage,
a tuple going from one to the next without leaving the task.  Between levels k and k + 1 is one
exchange, which carries every stream that has somewhere further on to go; one that skips a level
is handed through unopened.  So nothing is computed twice, and nothing need be kept for a second
reader.

What always holds, and is tested on random DAGs:

- no subscription goes back to an earlier level, and one whose grouping moves goes to a later one;
- within a level, a bolt comes after the bolts that it reads;
- each level but the first has a bolt;
- what needs identity, so does everything upstream of it.

Independent of Spark, and deterministic: the same topology has the same layout everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ackcore.topology.components import DEFAULT_STREAM
from ackcore.topology.groupings import Grouping
from ackcore.topology.parts import Parts


@dataclass(frozen=True, slots=True)
class Subscription:
    """One bolt's subscription to one stream: Storm's word for what joins two components.

    Parameters
    ----------
    index : int
        Its number, from 0, in the order of declaration: what a packed tuple is tagged with.
    source, stream : str
        What is read.
    target : str
        The bolt that reads it.
    grouping : Grouping
        How tuples are dealt out.
    parallelism : int or None
        How many tasks the target was asked to have.
    level_from, level_to : int
        The levels of source and target.
    """

    index: int
    source: str
    stream: str
    target: str
    grouping: Grouping
    parallelism: int | None
    level_from: int
    level_to: int

    @property
    def moves(self) -> bool:
        """Whether tuples pass an exchange.

        They may though the grouping leaves them where they are (`spreads` is false), if the bolt
        is on a later level for another input's sake.
        """
        return self.level_to > self.level_from

    @property
    def spreads(self) -> bool:
        """Whether the grouping says where each goes; else each stays in its partition."""
        return self.grouping.moves(self.parallelism)


@dataclass(frozen=True, eq=False)
class Layout:
    """Levels, subscriptions, and what has to be known of rows; light to ship, without components.

    Parameters
    ----------
    levels : mapping from str to int
        The level of each component: 1 reads the source, k + 1 sits behind k exchanges.
    order : tuple of str
        The bolts, each after those it reads; of several that might be next, as declared.
    subscriptions : tuple of Subscription
        By index.
    sinks : frozenset of (str, str)
        The component and stream of those that have a sink.
    needs_identity : frozenset of str
        Components whose rows must be told apart (message id, attempt, stable id): those that look
        at single tuples, and everything upstream of them, which has to hand it on.
    checks_unique : bool
        Whether some spout's message ids have to be checked for repetitions.
    """

    levels: Mapping[str, int]
    order: tuple[str, ...]
    subscriptions: tuple[Subscription, ...]
    sinks: frozenset[tuple[str, str]]
    needs_identity: frozenset[str]
    checks_unique: bool

    @classmethod
    def of(cls, topology: Parts) -> Layout:
        """Lay a topology out; it has been built, so it has no cycle."""
        order = _in_order(topology)
        levels = dict.fromkeys(topology.spouts, 1)
        for name in order:
            bolt = topology.bolts[name]
            levels[name] = max(
                levels[each.component] + each.grouping.moves(bolt.parallelism)
                for each in bolt.inputs
            )
        inputs = [(bolt.name, each) for bolt in topology.bolts.values() for each in bolt.inputs]
        return cls(
            # As declared, spouts first: a set's order would differ from process to process.
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
            sinks=frozenset((sink.component, sink.stream) for sink in topology.sinks.values()),
            needs_identity=_upstream(topology, reversed(order)),
            checks_unique=any(
                spout.tracked and bool(spout.message_id) and not spout.unique
                for spout in topology.spouts.values()
            ),
        )

    @property
    def depth(self) -> int:
        """The number of levels."""
        return max(self.levels.values())

    @property
    def exchanges(self) -> int:
        """The number of exchanges that tuples pass, without the one before the settle stage."""
        return self.depth - 1

    @property
    def settles(self) -> bool:
        """Whether there is a settle stage: without one, each task decides its own records."""
        return self.exchanges > 0 or self.checks_unique

    def at(self, level: int) -> tuple[str, ...]:
        """Return the bolts of a level, each after those it reads."""
        return self._at.get(level, ())

    def out(self, component: str, stream: str = DEFAULT_STREAM) -> tuple[Subscription, ...]:
        """Return the subscriptions that a stream feeds."""
        return self._out.get((component, stream), ())

    def into(self, component: str) -> tuple[Subscription, ...]:
        """Return the subscriptions that feed a bolt."""
        return self._into.get(component, ())

    def crossing(self, level: int) -> tuple[Subscription, ...]:
        """Return the subscriptions that the exchange behind a level carries, opened or not."""
        return tuple(sub for sub in self.subscriptions if sub.level_from <= level < sub.level_to)

    def sunk(self, component: str, stream: str = DEFAULT_STREAM) -> bool:
        """Whether a sink reads a stream."""
        return (component, stream) in self.sinks

    @cached_property
    def _at(self) -> dict[int, tuple[str, ...]]:
        found: dict[int, tuple[str, ...]] = {}
        for name in self.order:
            found[self.levels[name]] = (*found.get(self.levels[name], ()), name)
        return found

    @cached_property
    def _out(self) -> dict[tuple[str, str], tuple[Subscription, ...]]:
        found: dict[tuple[str, str], tuple[Subscription, ...]] = {}
        for sub in self.subscriptions:
            key = (sub.source, sub.stream)
            found[key] = (*found.get(key, ()), sub)
        return found

    @cached_property
    def _into(self) -> dict[str, tuple[Subscription, ...]]:
        found: dict[str, tuple[Subscription, ...]] = {}
        for sub in self.subscriptions:
            found[sub.target] = (*found.get(sub.target, ()), sub)
        return found


def _in_order(topology: Parts) -> tuple[str, ...]:
    """Return the bolts so that each comes after those it reads, and else as declared."""
    names = list(topology.bolts)
    number = {name: at for at, name in enumerate(names)}
    waits_for = {
        name: {each.component for each in bolt.inputs} & number.keys()
        for name, bolt in topology.bolts.items()
    }
    readers: dict[str, list[str]] = {name: [] for name in names}
    for name, sources in waits_for.items():
        for source in sources:
            readers[source].append(name)
    # The least number first, whatever order a set gave its readers in.
    ready = [number[name] for name in names if not waits_for[name]]
    order = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for reader in readers[name]:
            waits_for[reader].discard(name)
            if not waits_for[reader]:
                heapq.heappush(ready, number[reader])
    return tuple(order)


def _upstream(topology: Parts, last_first: Iterable[str]) -> frozenset[str]:
    """Return the bolts that need identity and all that they hang from, spouts included."""
    found: set[str] = set()
    for name in last_first:
        bolt = topology.bolts[name]
        if name in found or bolt.component.needs_identity:
            found.update((name, *(each.component for each in bolt.inputs)))
    return frozenset(found)

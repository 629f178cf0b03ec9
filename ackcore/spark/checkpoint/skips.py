"""Planned rows that are left out, because their source cannot read them any more."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ackcore._error_hints import naming_arguments
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.checkpoint.decisions import Plan
from ackcore.spark.checkpoint.places import CheckpointParts, opened
from ackcore.spark.checkpoint.records import HEAD, Records
from ackcore.spark.stores.opening import open_store, place_of
from ackcore.spark.stores.run_files import remove_all

#: The record of the last skips, and the most of them.
_RECORD, _MOST = "skipped", 100
#: By kind of a source whose plans have ``files``, the place of the name in the entry of a file.
_NAME_AT = {"files": 1, "delta": 0}
#: The words after the name of a planned file in an error about it.
_FATE = "(?:cannot be|disappeared|grew|was replaced)"


@dataclass(frozen=True, slots=True)
class Skip:
    """Planned rows of a spout that are left out.

    Attributes
    ----------
    batch_id : int
        The micro-batch whose plan had the rows.
    spout : str
        The name of the spout.
    files : tuple of str
        The files, for a `FileSpout` or a `DeltaSpout`. Bytes that are not UTF-8 are escaped.
    plans : int
        The number of the source's plans that lost rows. A micro-batch may take several plans of a
        source.
    at_ms : int
        The time of the call in milliseconds since 1970.
    """

    batch_id: int
    spout: str
    files: tuple[str, ...]
    plans: int
    at_ms: int

    @property
    def rows(self) -> str:
        """The rows as a text: the first ten files, or all rows of the spout."""
        more = ", ..." if len(self.files) > 10 else ""
        return ", ".join(self.files[:10]) + more or "all rows"


@naming_arguments
def skip_planned(
    checkpoint: str | os.PathLike[str],
    spout: str,
    files: str | Collection[str] | None = None,
    *,
    dry_run: bool = False,
) -> Skip:
    """Leave out planned rows that the source of a spout cannot read any more.

    A query ends if the planned rows of a micro-batch cannot be read, and reads the same rows at its
    next start. After this call the next start leaves them out. They are neither ACKED nor DEAD, and
    ``ackcore status`` lists them. Stop the query first: the call is refused while a driver holds
    the checkpoint on a file system, and fences that driver in a bucket or in HDFS.

    Parameters
    ----------
    checkpoint : path
        The checkpoint: a directory, or the URL of a place in a bucket.
    spout : str
        The name of the spout. It must read a planned source other than Kafka.
    files : str or collection of str, optional
        Only the rows of these files of a `FileSpout` or a `DeltaSpout`: paths below the place of
        the source; at least one. By default all planned rows of the spout.
    dry_run : bool, default False
        Whether to leave out nothing, and only return the result.

    Returns
    -------
    Skip
        The rows that are left out: ``batch_id, spout, files, plans, at_ms``.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    ValueError
        If no micro-batch is planned and undecided; if its plan has no such rows, perhaps after an
        earlier call; if the spout reads Kafka; or if ``files`` is empty.
    StateError
        If the checkpoint cannot be read or written; `CheckpointInUse` while a driver holds it.
    """
    files = (files,) if isinstance(files, str) else files
    if files is not None and not files:
        raise ValueError("files must name at least one file; omit it to leave out all planned rows")
    url = place_of(checkpoint, "checkpoint")
    store = open_store(f"{url}/ackcore", "checkpoint")
    if store.get(HEAD) is None:
        raise FileNotFoundError(f"there is no checkpoint at {url}")
    if dry_run:
        return _skipped(url, Records(store), spout, files)[0]

    def use(parts: CheckpointParts) -> tuple[Records, Skip]:
        records = parts.records
        skip, plan = _skipped(url, records, spout, files)
        remove_all(parts.runs.snapshot(plan.number))  # it may have the rows
        before = records.read(_RECORD) or {"skips": []}
        found = [*before["skips"], asdict(skip)][-_MOST:]
        records.write(_RECORD, {"skips": found}, with_next=True)
        records.write(f"batches/{plan.number}.plan", plan.body())
        return records, skip

    records, skip = opened(url, use)
    records.close()
    return skip


def skips_in(records: Records) -> tuple[Skip, ...]:
    """Return the last skips of a checkpoint, 100 at most, the newest last."""
    body = records.read(_RECORD)
    found = () if body is None else body["skips"]
    return tuple(Skip(**{**one, "files": tuple(one["files"])}) for one in found)


def skip_command(
    url: str, spout: str, kind: str, root: str, plans: Sequence[Any], said: str
) -> str:
    """Return the ``ackcore skip`` command that leaves out rows which could not be read.

    ``kind``: the kind of the spout's source. ``root``: the directory of its files. ``plans``: its
    planned rows. ``said``: the text of the error: the command names the planned files that are in
    it, or no file for all rows.
    """
    words = ["ackcore", "skip", url, spout]
    for name in [name for plan in plans for name in _files(kind, plan) if shown(name) in said]:
        path = f"(?:{re.escape(root)}/)?{re.escape(shown(name))}"
        if re.search(f"the file {path} {_FATE}", said):
            words += ["--file", name]
    return shown(shlex.join(words))


def shown(name: str) -> str:
    """Return a file's name for messages; bytes that are not UTF-8 are escaped."""
    return name.encode("utf-8", "backslashreplace").decode()


def _files(kind: str, plan: Any) -> list[str]:
    return [one[_NAME_AT[kind]] for one in plan["files"]] if kind in _NAME_AT else []


def _skipped(
    url: str, records: Records, spout: str, files: Collection[str] | None
) -> tuple[Skip, Plan]:
    """Return the rows to leave out, and the undecided plan without them; write nothing.

    Raises ValueError if no plan is undecided, it has no such rows, or the spout reads Kafka.
    ``files``: the files of the rows; None for all rows.
    """
    meta = records.read_meta()
    number = max(records.numbers(".plan"), default=None)
    body = None if number is None else records.read(f"batches/{number}.plan")
    if meta is None or body is None or records.read(f"batches/{number}.decision") is not None:
        raise ValueError(
            f"{url} has no micro-batch that is planned and not decided, so it has no planned rows "
            "to leave out: start the query again"
        )
    plan = Plan.of(body)
    kind = meta["structure"]["spouts"].get(spout, {}).get("source")
    taken = plan.offsets.get(spout, {})
    where = f"micro-batch {number} of {url}"
    if kind == "kafka":
        raise ValueError(
            f"spout {spout!r} reads Kafka: give its KafkaSpout lost='dead-letter' instead, which "
            "continues without deleted offsets"
        )
    if not taken.get("rows"):
        have = [name for name, of in plan.offsets.items() if of.get("rows")]
        raise ValueError(
            f"{where} has no planned rows of spout {spout!r}, or they were left out before; it has "
            f"rows of {', '.join(have) or 'no planned source'}"
        )
    rows = taken["rows"]
    there = {shown(name) for one in rows for name in _files(kind, one)}
    wanted = {shown(name) for name in files or ()}
    unknown = sorted(wanted - there)
    if unknown:
        raise ValueError(
            f"{where} has no planned file {unknown[0]!r} of spout {spout!r}, or it was left out "
            f"before; it has {', '.join(sorted(there)[:10]) or 'no files'}"
        )
    left = [_without(kind, one, wanted) for one in rows] if wanted else []
    gone = tuple(sorted(wanted or there))
    changed = sum(a != b for a, b in zip(rows, left, strict=True)) if wanted else len(rows)
    skip = Skip(plan.number, spout, gone, changed, wall_clock_ms())
    offsets = {**plan.offsets, spout: {**taken, "rows": left, "last": None if left else rows[-1]}}
    # Root ids now belong to other records, and no driver has crashed with these rows.
    plan = replace(plan, offsets=offsets, crashes=0, careful=False, interrupted=True)
    return skip, plan.without_suspects()


def _without(kind: str, plan: Mapping[str, Any], files: Collection[str]) -> Mapping[str, Any]:
    kept = [one for one in plan["files"] if shown(one[_NAME_AT[kind]]) not in files]
    return {**plan, "files": kept}

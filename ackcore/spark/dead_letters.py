"""Dead letters: the records that were given up, with all that is needed to see why and try again.

A store is a directory, ``<checkpoint>/ackcore/dead_letters`` or another, of one checkpoint::

    <spout>/batch-<N>.parquet    the dead of micro-batch N; written again alike if N acts again
    .owner.json                  whose they are: deployment key and checkpoint
    .replayed/<request>.json     which rows (by file and position) were sent again

`replay` makes a request (see `ackcore.spark.replays`): staged, noted here, published.  A letter
stays where it is when it is sent again; should it die again, there is another letter.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from ackcore._records import Int64s
from ackcore.spark import replays
from ackcore.spark.decisions import ATTEMPT, FIRST_MS, LAST_MS, MESSAGE_ID, REASON, TRACKING
from ackcore.spark.errors import one_line
from ackcore.spark.events import refuse_session
from ackcore.spark.files import (
    CheckpointForeign,
    Lock,
    StateError,
    corrupt,
    local_path,
    make_directory,
    read_record,
    remove,
    remove_temporaries,
    write_file,
    write_record,
)
from ackcore.topology.tuples import Reason

_TIME = pa.timestamp("ms", "UTC")
#: What every letter has beside its payload.
_LETTER = pa.schema(
    [
        pa.field("message_id", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("error_type", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("component", pa.string()),
        pa.field("first_ms", _TIME),
        pa.field("last_ms", _TIME),
        pa.field("batch_id", pa.int64()),
    ]
)
_DDL = (
    "spout string, message_id string, attempts int, error_type string, error_message string, "
    "component string, first_ms timestamp, last_ms timestamp, batch_id bigint, payload struct<>"
)
_FILE = re.compile(r"batch-(\d+)\.parquet")
_REQUEST = re.compile(r"[A-Za-z0-9_-]{1,64}")
_OWNER, _POINTER, _NOTES = ".owner.json", "dead_letters.json", ".replayed"


class Replay(NamedTuple):
    """A request to run dead letters again.

    Attributes
    ----------
    request : str
        Its id.
    records : dict of str to int
        How many letters it holds, by spout.
    """

    request: str
    records: dict[str, int]


class DeadLetters:
    """The store of a checkpoint, as the driver writes it; made by `open`."""

    def __init__(self, path: Path):
        self.path = path

    @classmethod
    def open(
        cls,
        checkpoint: str | os.PathLike[str],
        deployment_key: int,
        path: str | os.PathLike[str] | None = None,
    ) -> DeadLetters:
        """Take a directory as the store of an open checkpoint.

        Parameters
        ----------
        checkpoint : path
            The checkpoint, which remembers a store elsewhere.
        deployment_key : int
            ``State.deployment_key``.
        path : path, optional
            The store; inside the checkpoint if not given.

        Raises
        ------
        CheckpointForeign
            If it holds the letters of another checkpoint, which would be overwritten.
        StateError
            If it cannot be written.
        """
        root = local_path(checkpoint, "checkpoint") / "ackcore"
        inside = root / "dead_letters"
        store = make_directory(inside if path is None else local_path(path, "dead_letters"))
        owner = read_record(store / _OWNER, _OWNER)
        key = f"{deployment_key:016x}"
        if owner is None:
            if _files(store):
                raise corrupt(
                    store / _OWNER, "is missing, though there are letters beside it: it was removed"
                )
            about = {"deployment_key": key, "checkpoint": str(root.parent)}
            write_record(store / _OWNER, _OWNER, about)
        elif owner["deployment_key"] != key:
            raise CheckpointForeign(
                f"{store} holds the dead letters of the checkpoint {owner['checkpoint']} "
                f"(deployment {owner['deployment_key']}), and those of {root.parent} ({key}) would "
                "overwrite them; give dead_letters= a directory of its own"
            )
        pointer = read_record(root / _POINTER, _POINTER)
        if store != (inside if pointer is None else Path(pointer["path"])):
            write_record(root / _POINTER, _POINTER, {"path": str(store)})
        return cls(store)

    def write(self, number: int, dead: Mapping[str, pa.Table]) -> None:
        """Write the dead of a micro-batch; once more does no harm.

        Parameters
        ----------
        number : int
            The micro-batch.
        dead : mapping from str to pyarrow.Table
            ``Decision.dead``.

        Raises
        ------
        StateError
            If it cannot be written.
        """
        for spout, table in dead.items():
            if table.num_rows:
                letters = _letters(table, number)
                path = make_directory(self.path / spout) / f"batch-{number}.parquet"
                write_file(path, partial(pq.write_table, letters, **_WRITING))

    def reasons(self) -> Iterator[tuple[Reason, int]]:
        """Yield why records died and how many of each reason, from all letters that there are.

        Raises
        ------
        CheckpointCorrupt
            If a letter is damaged.
        """
        columns = ["component", "error_type", "error_message"]
        for files in _files(self.path).values():
            for path in files.values():
                counted = _read(path, columns).group_by(columns).aggregate([([], "count_all")])
                for row in counted.select([*columns, "count_all"]).to_pylist():
                    *reason, deaths = row.values()
                    yield Reason(*reason), deaths


#: Pages carry checksums, so that a flipped bit is an error and not another letter.
_WRITING: dict[str, Any] = {"write_page_checksum": True, "compression": "zstd"}


def _letters(dead: pa.Table, number: int) -> pa.Table:
    decode = cache(Reason.decode)  # many die of one cause
    reasons = [decode(text) for text in dead[REASON].to_pylist()]
    payload = dead.select(dead.column_names[len(TRACKING) :])
    columns = [
        dead[MESSAGE_ID],
        dead[ATTEMPT],
        pa.array([reason.type for reason in reasons], pa.string()),
        pa.array([reason.message for reason in reasons], pa.string()),
        pa.array([reason.component for reason in reasons], pa.string()),
        dead[FIRST_MS].cast(_TIME),
        dead[LAST_MS].cast(_TIME),
        pa.array(np.full(dead.num_rows, number)),
        payload.to_struct_array(),
    ]
    return pa.table(columns, schema=_LETTER.append(pa.field("payload", columns[-1].type)))


def _records(letters: pa.Table) -> pa.Table:
    """Letters as records that wait for their first attempt."""
    told = zip(
        *(letters[name].to_pylist() for name in ("component", "error_type", "error_message")),
        strict=True,
    )
    zeros = np.zeros(letters.num_rows, np.int64)
    columns = [
        letters["message_id"],
        pa.array(zeros.astype(np.int32)),
        pa.array(zeros),
        *(letters[name].cast(_TIME).cast(pa.int64()) for name in ("first_ms", "last_ms")),
        pa.array([Reason(*each).encode() for each in told], pa.string()),
    ]
    payload = letters["payload"].type
    fields = [payload.field(n) for n in range(payload.num_fields)]
    columns += pa.Table.from_struct_array(letters["payload"]).columns
    return pa.table(columns, schema=pa.schema([*TRACKING, *fields]))


# -- finding a store --------------------------------------------------------------------------


def _files(store: Path) -> dict[str, dict[int, Path]]:
    """Every file of a store, by spout and micro-batch, in order."""
    found: dict[str, dict[int, Path]] = {}
    for directory in sorted(store.iterdir()) if store.is_dir() else ():
        if directory.is_dir() and not directory.name.startswith("."):
            names = ((_FILE.fullmatch(path.name), path) for path in directory.iterdir())
            numbers = {int(match[1]): path for match, path in names if match}
            if numbers:
                found[directory.name] = dict(sorted(numbers.items()))
    return found


def _store_of(path: str | os.PathLike[str]) -> Path:
    """The store that a path means: the path, or the one of that checkpoint."""
    given = local_path(path, "path")
    root = given / "ackcore"
    if (given / _OWNER).is_file():
        return given
    if not (root / "meta.json").is_file():
        raise FileNotFoundError(
            f"path must be a checkpoint or a store of dead letters, and {given} is neither: it "
            f"has no ackcore/meta.json and no {_OWNER} in it"
        )
    pointer = read_record(root / _POINTER, _POINTER)
    return root / "dead_letters" if pointer is None else Path(pointer["path"])


def _chosen(store: Path, spout: str | None) -> dict[str, dict[int, Path]]:
    files = _files(store)
    if spout is None or not files:
        return files
    if spout in files:
        return {spout: files[spout]}
    try:
        known = {*files, *_owner(store)[1]}
    except (FileNotFoundError, StateError):  # the letters can be read without their checkpoint
        known = {*files}
    if spout not in known:
        raise ValueError(f"spout must be one of {', '.join(sorted(known))}, got {spout!r}")
    return {}


# -- reading ----------------------------------------------------------------------------------


def dead_letters(
    path: str | os.PathLike[str],
    spark: SparkSession | None = None,
    spout: str | None = None,
) -> DataFrame:
    """Return the dead letters of a checkpoint.

    Parameters
    ----------
    path : path
        The checkpoint, or the directory that was given as ``dead_letters``.
    spark : SparkSession, optional
        The active one if not given.
    spout : str, optional
        Whose letters; everybody's if not given.

    Returns
    -------
    pyspark.sql.DataFrame
        ``spout, message_id, attempts, error_type, error_message, component``, ``first_ms`` and
        ``last_ms`` (timestamps: when the record was first seen and when it died), ``batch_id``,
        and ``payload``: a struct of the source's columns.  Where spouts differ in columns it has
        those of all, null where a spout has them not.  (An interval is told in microseconds,
        since Parquet has none; `replay` sends it as it was.)

    Raises
    ------
    FileNotFoundError
        If the path is neither a checkpoint nor a store.
    ValueError
        If two spouts have a column of one name and of different types: ask for one spout; or if
        the topology has no ``spout`` of that name.
    """
    session = _session(spark)
    store = _store_of(path)
    frames = [_frame(session, store, name) for name in _chosen(store, spout)]
    if not frames:
        return session.createDataFrame([], _DDL)
    try:
        return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), frames)
    except AnalysisException as error:
        raise ValueError(
            f"the payloads of the spouts {', '.join(_files(store))} do not go into one table: "
            f"{error}. Ask for one spout: dead_letters(path, spout=...)"
        ) from error


def _session(spark: SparkSession | None) -> SparkSession:
    found = spark or SparkSession.getActiveSession()
    if found is None:
        raise ValueError("spark must be given: there is no active session")
    refuse_session(found)
    return found


def _frame(spark: SparkSession, store: Path, spout: str) -> DataFrame:
    # Spark takes a path for a pattern, and does not decode the escapes of a URI.
    path = re.sub(r"([*?\[\]{}\\])", r"\\\1", f"file://{store / spout}")
    # A struct's columns may have changed since the first letter.
    frame = spark.read.option("mergeSchema", "true").parquet(path)
    return frame.select(F.lit(spout).alias("spout"), *frame.columns)


# -- sending again ----------------------------------------------------------------------------


def replay(
    path: str | os.PathLike[str],
    spark: SparkSession | None = None,
    *,
    where: str | Column | None = None,
    spout: str | None = None,
    again: bool = False,
    request: str | None = None,
) -> Replay:
    """Send dead letters through their topology again, as new records with all their attempts.

    The query need not be stopped: it takes them in its next micro-batch, else when it is started
    again.  What was sent once is not sent twice, whatever dies when.

    Parameters
    ----------
    path : path
        The checkpoint, or the directory that was given as ``dead_letters``.
    spark : SparkSession, optional
        Who evaluates ``where``: the active one if not given.
    where : str or Column, optional
        Which ones, over the columns of `dead_letters`; all if not given.
    spout : str, optional
        Whose; everybody's if not given.
    again : bool, default False
        Send also those that were sent already.
    request : str, optional
        An id of yours, of letters, digits, ``-`` and ``_``: a second call with the same id does
        nothing, and tells what the first one did.

    Returns
    -------
    Replay
        Id and numbers of records; no records if there was nothing to send.

    Raises
    ------
    FileNotFoundError
        If the path is neither a checkpoint nor a store, or the store's checkpoint is gone.
    ValueError
        If ``request`` is not an id, ``where`` not a condition over these columns, or the topology
        has no ``spout`` of that name.
    CheckpointForeign
        If the store belongs to another checkpoint, or the topology has other columns by now.
    CheckpointCorrupt
        If a file is damaged.
    """
    if spark is not None:
        refuse_session(spark)  # a condition without its name, say, would send all
    name = uuid.uuid4().hex if request is None else request
    if not isinstance(name, str) or not _REQUEST.fullmatch(name):
        raise ValueError(f"request must be 1 to 64 of letters, digits, - and _, got {name!r}")
    store = _store_of(path)
    root, fields = _owner(store)
    directory = make_directory(root / "replays")
    lock = Lock(directory / "lock", wait=True)
    try:
        _finish(directory)
        notes = _notes(store)
        if name in notes:
            return Replay(name, _counted(notes[name]))
        sent = {} if again else _sent(notes.values())
        rows: dict[str, dict[int, Int64s]] = {}
        tables: dict[str, pa.Table] = {}
        for each, files in _chosen(store, spout).items():
            chosen = None if where is None else _matches(_session(spark), store, each, where)
            rows[each], tables[each] = _take(files, chosen, sent.get(each, {}))
            _check_fields(store / each, tables[each], fields.get(each))
        tables = {each: table for each, table in tables.items() if table.num_rows}
        if tables:
            _send(directory, store, name, tables, rows)
        return Replay(name, {each: table.num_rows for each, table in tables.items()})
    finally:
        lock.close()


def _owner(store: Path) -> tuple[Path, dict[str, list[str]]]:
    """The checkpoint that a store belongs to, and its spouts' columns."""
    owner = read_record(store / _OWNER, _OWNER)
    root = store.parent
    if owner is None:  # nothing has died yet, and the store is the checkpoint's own
        owner = {"checkpoint": str(root.parent), "deployment_key": None}
    if not (root.name == "ackcore" and (root / "meta.json").is_file()):
        root = Path(owner["checkpoint"]) / "ackcore"
    meta = read_record(root / "meta.json", "meta.json")
    if meta is None:
        raise FileNotFoundError(
            f"the dead letters in {store} belong to the checkpoint {owner['checkpoint']}, which is "
            "not there any more; read them by dead_letters() and send them to the source again"
        )
    if owner["deployment_key"] not in (None, meta["deployment_key"]):
        raise CheckpointForeign(
            f"the dead letters in {store} belong to deployment {owner['deployment_key']}, and "
            f"{root} is now that of {meta['deployment_key']}; read them by dead_letters() and "
            "send them to the source again"
        )
    spouts = meta["structure"]["spouts"]
    return root, {name: list(spout["fields"]) for name, spout in spouts.items()}


def _finish(directory: Path) -> None:
    """See to the end what another one began who died: we hold the lock."""
    remove_temporaries(directory)
    for name in replays.staged(directory):
        if replays.counts(directory, name):
            replays.publish(directory, name)
        else:
            remove(directory / name)


def _send(
    directory: Path,
    store: Path,
    request: str,
    tables: Mapping[str, pa.Table],
    rows: Mapping[str, Mapping[int, Int64s]],
) -> None:
    notes = make_directory(store / _NOTES)
    note = notes / f"{request}.json"
    staged = [
        replays.stage(directory, request, spout, table, note) for spout, table in tables.items()
    ]
    spans = {
        spout: {str(number): _spans(each) for number, each in rows[spout].items() if len(each)}
        for spout in tables
    }
    about = {"request": request, "at_ms": time.time_ns() // 1_000_000, "rows": spans}
    write_record(note, f"{_NOTES}/{request}.json", about)
    # From here on it counts, and whoever looks next would finish it.
    for name in staged:
        replays.publish(directory, name)


def _notes(store: Path) -> dict[str, dict[str, dict[str, list[list[int]]]]]:
    """What was sent, by request, spout and micro-batch: spans of rows."""
    directory = store / _NOTES
    if not directory.is_dir():
        return {}
    found = {}
    for path in sorted(directory.glob("*.json")):
        if not path.name.startswith("."):
            record = read_record(path, f"{_NOTES}/{path.name}")
            assert record is not None
            found[path.stem] = record["rows"]
    return found


def _counted(note: Mapping[str, Mapping[str, list[list[int]]]]) -> dict[str, int]:
    return {
        spout: sum(end - start for spans in batches.values() for start, end in spans)
        for spout, batches in note.items()
    }


def _sent(
    notes: Iterable[Mapping[str, Mapping[str, list[list[int]]]]],
) -> dict[str, dict[int, list[list[int]]]]:
    found: dict[str, dict[int, list[list[int]]]] = {}
    for note in notes:
        for spout, batches in note.items():
            for number, spans in batches.items():
                found.setdefault(spout, {}).setdefault(int(number), []).extend(spans)
    return found


def _spans(rows: Int64s) -> list[list[int]]:
    """Sorted row numbers as ``[start, end)``."""
    cuts = np.flatnonzero(np.diff(rows) != 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(rows, cuts)]


def _matches(
    spark: SparkSession, store: Path, spout: str, where: str | Column
) -> dict[int, Int64s]:
    """Row numbers for which a condition holds, by micro-batch."""
    frame = _frame(spark, store, spout)
    try:
        at = frame.where(where).select("batch_id", F.col("_metadata.row_index"))
    except (PySparkException, TypeError) as error:
        raise ValueError(
            f"where must be a condition, as text or Column, over {', '.join(frame.columns)} (a "
            f"source's column as payload.<name>), got {where!r}: {one_line(error)}"
        ) from error
    by_batch: dict[int, list[int]] = {}
    for number, row in at.collect():
        by_batch.setdefault(number, []).append(row)
    return {number: np.sort(np.array(rows, np.int64)) for number, rows in by_batch.items()}


def _take(
    files: Mapping[int, Path],
    chosen: Mapping[int, Int64s] | None,
    sent: Mapping[int, list[list[int]]],
) -> tuple[dict[int, Int64s], pa.Table]:
    """Rows of a spout's files, and the records that are made of them."""
    rows: dict[int, Int64s] = {}
    tables: list[pa.Table] = []
    for number, path in files.items():
        if chosen is not None and number not in chosen:
            continue
        letters = _read(path)
        wanted = np.ones(letters.num_rows, np.bool_)
        if chosen is not None:
            wanted[:] = False
            wanted[chosen[number]] = True
        for start, end in sent.get(number, ()):
            wanted[start:end] = False
        rows[number] = np.flatnonzero(wanted)
        if len(rows[number]):
            tables.append(_records(letters.filter(pa.array(wanted))))
    if not tables:
        return rows, TRACKING.empty_table()
    try:
        return rows, pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        directory = next(iter(files.values())).parent
        raise StateError(
            f"the letters in {directory} do not all have the same columns, as they died before "
            f"and after a change of the topology: {error}. Send one kind at a time: where='...'"
        ) from error


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return pq.read_table(
            path, columns=columns, page_checksum_verification=True, partitioning=None
        )
    except (pa.ArrowException, OSError) as error:
        raise corrupt(path, f"is damaged: {error}") from error


def _check_fields(directory: Path, table: pa.Table, fields: list[str] | None) -> None:
    names = table.column_names[len(TRACKING) :]
    if table.num_rows and names != fields:
        now = "no spout of that name" if fields is None else f"the columns {', '.join(fields)}"
        raise CheckpointForeign(
            f"the dead letters in {directory} have the columns {', '.join(names)}, and the "
            f"topology has {now} by now; read them by dead_letters() and send them to the source"
        )

"""Dead letters as a DataFrame: the records that died, with the reasons.

A source's columns may change over time. Files with the same columns are read together. Their rows
then get the columns of all files, with nulls in those that they lack.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import reduce
from typing import Literal

import numpy as np
import pyarrow as pa
from pyspark.errors import AnalysisException, PySparkRuntimeError
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from ackcore._error_hints import counted, naming_arguments
from ackcore._records import Int64s
from ackcore.spark.base.arrow_batches import as_spark_types
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.schemas import LETTER
from ackcore.spark.base.session import is_case_sensitive, refuse_session
from ackcore.spark.base.versions import JOB_ERRORS, WRONG_VALUE, from_arrow_schema, to_arrow_schema
from ackcore.spark.base.workers import check_workers
from ackcore.spark.dead_letters.checkpoints import check_spout, store_of
from ackcore.spark.dead_letters.letter_files import (
    ATTEMPTS,
    FileGroup,
    ObjectFile,
    batch_rows,
    read_parts,
    read_schema,
)
from ackcore.spark.dead_letters.letter_store import Letters, kinds_of
from ackcore.spark.dead_letters.notes import Note, dropped_rows, notes_of, sent_rows

_FILE, _ROW = "_ackcore_file", "_ackcore_row"


@naming_arguments
def dead_letters(
    path: str | os.PathLike[str],
    spark: SparkSession | None = None,
    spout: str | None = None,
    *,
    payload: Literal["columns", "json"] = "columns",
) -> DataFrame:
    """Return the dead letters of a checkpoint.

    Parameters
    ----------
    path : path
        The checkpoint, or the value of ``dead_letters``: a directory, or a bucket's URL.
    spark : SparkSession, optional
        The session; by default the active one.
    spout : str, optional
        The spout of the letters; all by default.
    payload : {"columns", "json"}, default "columns"
        The form of ``payload``: a struct of the source's columns, or a JSON text of them. The text
        is available for all letters, also if a column has several types.

    Returns
    -------
    pyspark.sql.DataFrame
        One row per letter: ``spout, message_id, attempts, error_type, error_message, component,
        first_ms, last_ms, batch_id, replays, replayed, replay_request, payload``.

        ``first_ms`` and ``last_ms`` are the timestamps of the record's first intake and its death.
        ``replays`` is the number of replays of the record before it died. ``replayed`` is the
        number of times that the letter was sent again, without withdrawn requests, and
        ``replay_request`` the last request that sent it, or null. If spouts differ in columns, or a
        source has changed, the payload has all columns, and those that a letter lacks are null.

        The frame reads the files that exist at the call. Call again for later letters, and do not
        keep it for more than an hour. Letters that are dropped meanwhile disappear when their file
        is rewritten.

    Raises
    ------
    FileNotFoundError
        If the path is neither a checkpoint nor a store.
    ValueError
        If a column has two types: read one spout, or the payload as JSON. If the topology has no
        ``spout`` of that name, ``payload`` is neither of the two, or there is no session.
    CheckpointCorrupt
        If a file is damaged.
    """
    if payload not in ("columns", "json"):
        raise ValueError(f"payload must be 'columns' or 'json', got {payload!r}")
    session = session_of(spark)
    store = store_of(path)
    check_spout(store, spout)
    notes = notes_of(store)
    kinds = kinds_of(store, spout)
    frames = [letters_of(session, kind, notes) for kind in kinds]
    if payload == "json":
        text = F.to_json("payload", {"ignoreNullFields": "false"})
        frames = [frame.withColumn("payload", text) for frame in frames]
        return _united(session, frames, T.StringType())
    whole = _payload_columns(kinds, frames)
    for field in _source_columns(store, spout):
        # No letter has these columns yet: they do not change the types of the letters.
        whole.setdefault(field.name, field.dataType)
    target = T.StructType([T.StructField(name, kind) for name, kind in whole.items()])
    return _united(session, [conformed(frame, target) for frame in frames], target)


def _source_columns(store: Letters, spout: str | None) -> Iterator[T.StructField]:
    """Yield the present columns of a store's sources, as far as they are recorded."""
    for name in store.spouts() if spout is None else [spout]:
        columns = store.columns(name)
        if columns is not None:
            yield from payload_of(from_arrow_schema(read_schema(columns)))


def _united(session: SparkSession, frames: list[DataFrame], payload: T.DataType) -> DataFrame:
    if frames:
        return reduce(DataFrame.union, frames)
    columns: dict[str, T.DataType] = {"spout": T.StringType()}
    columns |= {field.name: field.dataType for field in from_arrow_schema(LETTER)}
    columns |= {"replayed": T.IntegerType(), "replay_request": T.StringType(), "payload": payload}
    # createDataFrame would start Python workers.
    return session.range(0).select(
        *(F.lit(None).cast(kind).alias(name) for name, kind in columns.items())
    )


def session_of(spark: SparkSession | None) -> SparkSession:
    """Return the given session, or by default the active one, or else the last one created.

    Raises ValueError if there is no such session or it was stopped, TypeError for another object.
    """
    try:
        found = spark or SparkSession.active()
    except PySparkRuntimeError as error:
        raise ValueError("spark must be given: there is no active session") from error
    refuse_session(found)
    return found


def letters_of(
    session: SparkSession, kind: FileGroup, notes: Sequence[Note], places: bool = False
) -> DataFrame:
    """Return the letters of files with the same columns, with the payload as written.

    The columns ``replayed`` and ``replay_request`` are added. Dropped letters are left out. One
    Python task reads each file. ``places``: whether to add columns for the file's name and the
    row number. Raises WorkerPythonError if the workers cannot run ackcore.
    """
    check_workers(session)
    spout, files = kind.spout, [file.path for file in kind.files]
    marks = pa.schema(
        [
            ("replayed", pa.int32()),
            ("replay_request", pa.string()),
            (_FILE, pa.string()),
            (_ROW, pa.int64()),
        ]
    )
    target = to_arrow_schema(from_arrow_schema(pa.schema([*read_schema(files[0]), *marks])))
    declared = from_arrow_schema(target)  # with the nullable fields of the payload
    named = [(file.key, file.size, file.digest, file.end) for file in files]
    store = files[0].objects.store
    notes = [note for note in notes if spout in note.rows]

    def read(ids: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        objects = Letters(store).objects
        for batch in ids:
            for i in batch.column(0).to_pylist():
                for rows in _rows(ObjectFile(objects, *named[i]), spout, notes):
                    yield as_spark_types(rows, target)

    frame = session.range(0, len(files), 1, len(files)).mapInArrow(read, declared)
    columns = [*LETTER.names, "replayed", "replay_request", "payload"]
    return frame.select(F.lit(spout).alias("spout"), *columns, *([_FILE, _ROW] if places else []))


def _rows(file: ObjectFile, spout: str, notes: Sequence[Note]) -> Iterator[pa.RecordBatch]:
    """Yield the letters of a file that are not dropped, with the columns that `letters_of` adds."""
    letters = batch_rows(file)
    times, newest = sent_rows(letters, spout, notes)
    dropped = dropped_rows(letters, spout, notes)
    requests = pa.array([note.request for note in notes], pa.string())
    done = 0
    for table in read_parts(file):
        here = slice(done, done + len(table))
        by = pa.array(newest[here], mask=newest[here] < 0)
        # A drop may have emptied rows after the notes were read.
        gone = dropped[here] | table[ATTEMPTS].is_null().to_numpy()
        table = (
            table.append_column("replayed", pa.array(times[here].astype(np.int32)))
            .append_column("replay_request", requests.take(by))
            .append_column(_FILE, pa.repeat(file.name, len(table)))
            .append_column(_ROW, pa.array(np.arange(here.start, here.stop)))
            .filter(pa.array(~gone))
        )
        done = here.stop
        yield from table.combine_chunks().to_batches()


def matching_rows(
    spark: SparkSession | None,
    store: Letters,
    spout: str | None,
    notes: Sequence[Note],
    where: str | Column,
) -> dict[ObjectFile, Int64s]:
    """Return, by file, the row numbers of the letters that satisfy a Spark condition, in any order.

    Files without such letters are left out. Raises ValueError if ``where`` is not a condition over
    these columns, or there is no session.

    ``spark``: the session that evaluates the condition. None for the active session. ``spout``: the
    spout of the letters; None for all. ``notes``: the notes of letters that were sent again or
    dropped. ``where``: the condition, over the columns of `dead_letters`.
    """
    session = session_of(spark)
    kinds = kinds_of(store, spout)
    found: dict[ObjectFile, list[int]] = {}
    frames = [letters_of(session, kind, notes, places=True) for kind in kinds]
    # Without spark.sql.caseSensitive, Spark takes id and ID for one column.
    folded = str if is_case_sensitive(session) else str.lower
    others = {folded(f.name): f for frame in frames for f in payload_of(frame.schema)}
    for field in _source_columns(store, spout):
        others.setdefault(folded(field.name), field)
    if not kinds:
        _check_condition(session, others.values(), where)
    for kind, frame in zip(kinds, frames, strict=True):
        own = payload_of(frame.schema)
        names = {*map(folded, own.names)}
        absent = [field for name, field in others.items() if name not in names]
        whole = conformed(frame, T.StructType([*own, *absent]))
        paths = {file.path.name: file.path for file in kind.files}
        try:
            for name, row in whole.where(where).select(_FILE, _ROW).collect():
                found.setdefault(paths[name], []).append(row)
        except (*JOB_ERRORS, TypeError) as error:
            about = isinstance(error, AnalysisException | TypeError)
            if not about and not WRONG_VALUE.search(str(error)):
                raise  # it is not about the condition: a worker died, or cannot read a file
            columns = ", ".join(whole.columns[:-2])
            raise ValueError(
                f"where must be a condition, as text or Column, over {columns} (a source's column "
                f"as payload.<name>), got {where!r}. Spark cannot evaluate it for the letters of "
                f"spout {kind.spout!r} in {counted(len(kind.files), 'file')}, the first "
                f"{kind.files[0].path.name}: {one_line(error)}"
            ) from error
    return {path: np.array(rows, np.int64) for path, rows in found.items()}


def _check_condition(
    session: SparkSession, columns: Iterable[T.StructField], where: str | Column
) -> None:
    """Raise ValueError if ``where`` is not a condition over letters with these source columns."""
    frame = _united(session, [], T.StructType([*columns]))
    try:
        frame.where(where).schema  # noqa: B018 - Spark Connect analyses the frame now
    except (AnalysisException, TypeError) as error:
        raise ValueError(
            f"where must be a condition, as text or Column, over {', '.join(frame.columns)} (a "
            f"source's column as payload.<name>), got {where!r}: {one_line(error)}"
        ) from error


# -- letters of different columns -----------------------------------------------------------------


def payload_of(letters: T.StructType) -> T.StructType:
    """Return the type of the payload in a schema of letters."""
    kind = letters["payload"].dataType
    assert isinstance(kind, T.StructType)
    return kind


def _payload_columns(
    kinds: Sequence[FileGroup], frames: Sequence[DataFrame]
) -> dict[str, T.DataType]:
    """Return the columns of all payloads. Raises ValueError if a column has two types."""
    whole: dict[str, T.DataType] = {}
    whose: dict[str, FileGroup] = {}
    for kind, frame in zip(kinds, frames, strict=True):
        for field in payload_of(frame.schema):
            before = whole.setdefault(field.name, field.dataType)
            first = whose.setdefault(field.name, kind)
            has, had = field.dataType.simpleString(), before.simpleString()
            if has != had:  # both are without nullability, which a union of frames widens
                one = "" if kind.spout == first.spout else "a single spout with spout=..., or "
                raise ValueError(
                    f"the payload column {field.name!r} is {has} in {_told(kind)} and {had} in "
                    f"{_told(first)}. Read {one}the payload as text with payload='json'"
                )
    return whole


def _told(kind: FileGroup) -> str:
    first, last = kind.files[0].first, max(file.last for file in kind.files)
    return f"letters of spout {kind.spout!r} (batch_id {first} to {last})"


def conformed(frame: DataFrame, payload: T.StructType) -> DataFrame:
    """Return letters whose payload has exactly the given columns; those that it lacks are null.

    A null payload stays null.
    """
    was, column = payload_of(frame.schema), F.col("payload")
    if was == payload:
        return frame
    fields = (
        column.getField(field.name) if field.name in was.names else F.lit(None).cast(field.dataType)
        for field in payload
    )
    named = [one.alias(name) for one, name in zip(fields, payload.names, strict=True)]
    return frame.withColumn("payload", F.when(column.isNotNull(), F.struct(*named)))

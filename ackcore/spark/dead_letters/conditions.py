"""Selection of letters by a Spark condition. `replay` imports this module only for a condition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pyspark.sql import Column, SparkSession
from pyspark.sql import types as T

from ackcore._records import Int64s
from ackcore.spark.base.errors import one_line
from ackcore.spark.base.versions import JOB_ERRORS
from ackcore.spark.dead_letters.files import Kind, ObjectFile
from ackcore.spark.dead_letters.notes import Note
from ackcore.spark.dead_letters.reading import conformed, letters_of, payload_of, session_of


def matching_rows(
    spark: SparkSession | None, kinds: Sequence[Kind], notes: Sequence[Note], where: str | Column
) -> dict[ObjectFile, Int64s]:
    """Return the numbers of the rows that satisfy a condition, by file.

    Parameters
    ----------
    spark : SparkSession or None
        The session that evaluates the condition. None for the active session.
    kinds : sequence of Kind
        The files.
    notes : sequence of Note
        The notes of letters that were sent again or dropped.
    where : str or Column
        The condition, over the columns of `dead_letters`.

    Raises
    ------
    ValueError
        If ``where`` is not a condition over these columns, or there is no session.
    """
    session = session_of(spark)
    found: dict[ObjectFile, list[int]] = {}
    frames = [letters_of(session, kind, notes, places=True) for kind in kinds]
    others = {field.name: field for frame in frames for field in payload_of(frame)}
    for kind, frame in zip(kinds, frames, strict=True):
        own = payload_of(frame)
        absent = [field for name, field in others.items() if name not in own.names]
        whole = conformed(frame, T.StructType([*own, *absent]))
        paths = {file.path.name: file.path for file in kind.files}
        try:
            for name, row in whole.where(where).select("_ackcore_file", "_ackcore_row").collect():
                found.setdefault(paths[name], []).append(row)
        except (*JOB_ERRORS, TypeError) as error:
            columns = ", ".join(whole.columns[:-2])
            raise ValueError(
                f"where must be a condition, as text or Column, over {columns} (a source's column "
                f"as payload.<name>), got {where!r}, which the letters of spout {kind.spout!r} in "
                f"{kind.files[0].path.name} and {len(kind.files) - 1} more files do not have an "
                f"answer to: {one_line(error)}"
            ) from error
    return {path: np.array(rows, np.int64) for path, rows in found.items()}

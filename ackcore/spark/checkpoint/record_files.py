"""Records of one deployment: each carries its key, and is refused where it is another's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ackcore.spark.base.atomic import make_directory
from ackcore.spark.base.checksummed import read_record, write_record
from ackcore.spark.base.errors import CheckpointForeign, CheckpointInUse


class RecordFiles:
    """The records of a checkpoint, by their names below it.

    Parameters
    ----------
    root : Path
        ``<checkpoint>/ackcore``.
    deployment : str
        The deployment's key.
    """

    def __init__(self, root: Path, deployment: str):
        self.root = root
        self._deployment = deployment

    def read(self, name: str) -> dict[str, Any] | None:
        """Return a record, None if there is none.

        Raises
        ------
        CheckpointCorrupt, CheckpointNewer, StateError
            As `read_record`.
        CheckpointForeign
            If it is of another deployment.
        """
        body = read_record(self.root / name, name)
        if body is not None and body["deployment_key"] != self._deployment:
            raise CheckpointForeign(
                f"{self.root / name} was written for deployment {body['deployment_key']}, and "
                f"{self.root / 'meta.json'} is of {self._deployment}: it was copied here from "
                "another checkpoint. Put back the file that belongs here, or start on a new "
                "checkpoint"
            )
        return body

    def write(
        self,
        name: str,
        body: Mapping[str, Any],
        *,
        once: bool = False,
        made_in: Path | None = None,
    ) -> None:
        """Write a record; ``once`` and ``made_in`` are those of `write_file`.

        Raises
        ------
        CheckpointInUse
            If another driver has taken over, or wrote what is to be written once.
        """
        path = self.root / name
        make_directory(path.parent)
        whole = {"deployment_key": self._deployment, **body}
        try:
            write_record(path, name, whole, once=once, made_in=made_in)
        except FileExistsError:
            raise CheckpointInUse(
                f"{path} was written by another driver, while this one was about to. Two at once "
                "are one too many: let the other one go on, or stop it and start again, and it "
                "goes on from that record"
            ) from None

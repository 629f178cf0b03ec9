"""Where a job's checkpoint, its dead letters and its sink are, as tests look at them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import ClassVar

from s3_server import environment, objects_of

from ackcore.spark.stores.opening import open_store

#: By place, the fixture of the proxy that its bucket is behind.
PROXIES = {"bucket": "s3", "s3proxy": "second_s3"}


class Disk:
    """A directory.

    Attributes
    ----------
    checkpoint, sink : str
        What a query is given.
    more : dict
        What else it is given.
    environment : dict
        What its workers need to reach it.
    """

    more: ClassVar = {}
    environment: ClassVar = {}

    def __init__(self, directory: Path):
        self._directory = directory
        self.checkpoint, self.sink = f"{directory}/checkpoint", f"{directory}/sink"

    def fetched(self) -> Path:
        """Return a directory with the files: ``checkpoint``, ``sink`` and ``sink-closed``."""
        return self._directory

    def contents(self) -> dict[str, bytes]:
        """Return the contents by name, without the work of runs, which nobody reads again."""
        return {
            str(path.relative_to(self._directory)): path.read_bytes()
            for top in (Path(self.checkpoint), *self._directory.glob("sink*"))
            for path in top.rglob("*")
            if path.is_file() and "ackcore/work/" not in str(path)
        }

    def lose_lock(self, how: str = "removed") -> None:
        """Take the lock from who holds it, as a shared file system may, of a host that is silent.

        ``how`` is "removed", or "copied": as when the checkpoint was put back from a copy.
        """
        if how == "removed":
            Path(self.checkpoint, "ackcore/lock").unlink()
        else:
            shutil.copytree(self.checkpoint, f"{self.checkpoint}-copy")
            shutil.rmtree(self.checkpoint)
            Path(f"{self.checkpoint}-copy").rename(self.checkpoint)


class Bucket:
    """A place in a bucket, but for Spark's own log, which is in a directory.

    It is looked at on the server itself, past the faults of what the query goes through.
    """

    def __init__(self, url: str, endpoint: str, environment: dict[str, str], directory: Path):
        self.bucket, _, self._prefix = url.removeprefix("s3://").partition("/")
        self._endpoint, self._directory = endpoint, directory
        self.environment = environment
        self._looks = 0
        self.checkpoint, self.sink = f"{url}/checkpoint", f"{url}/sink"
        self.more = {"spark_checkpoint": f"{directory}/spark"}

    @classmethod
    def before(cls, proxy, directory: Path) -> Bucket:
        """Make one in a new bucket of a proxy's server."""
        url = f"s3://{proxy.server.new_bucket()}/some/place"
        return cls(url, proxy.server.endpoint, environment(proxy.endpoint), directory)

    def _objects(self) -> dict[str, bytes]:
        prefix = f"{self._prefix}/"
        found = objects_of(self._endpoint, self.bucket, prefix)
        return {key.removeprefix(prefix): data for key, data in found.items()}

    def unnamed_letters(self) -> set[str]:
        """The files of letters that the index does not name.

        They are no dead letters: none who reads them looks for files, all ask the index, and no
        later index can name one, as its key bears the epoch of the driver that put it, and bits
        drawn at random.  A driver puts one before the index, by which it is refused if it was
        taken over from; the next driver that opens the store deletes it.
        """
        return self._unnamed_letters(self._objects())

    @staticmethod
    def _unnamed_letters(objects: dict[str, bytes]) -> set[str]:
        below = "checkpoint/ackcore/dead_letters/"
        index = objects.get(f"{below}index.json", b"")
        files = {name for name in objects if name.startswith(below) and name.endswith(".parquet")}
        return {name for name in files if name.removeprefix(below).encode() not in index}

    def fetched(self) -> Path:
        """Return a directory with a copy of all objects as files."""
        self._looks += 1
        copy = self._directory / f"fetched-{self._looks}"
        objects = self._objects()
        for name in self._unnamed_letters(objects):
            del objects[name]
        for name, data in objects.items():
            path = copy / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return copy

    def contents(self) -> dict[str, bytes]:
        """See `Disk.contents`; only the records that the head or its records name.

        A driver that was overtaken may have put a table before it met the head: nobody names it.
        Of files of letters those that the index names (`unnamed_letters`).
        """
        objects = self._objects()
        for name in self._unnamed_letters(objects):
            del objects[name]
        root = "checkpoint/ackcore/"
        named = b"".join(
            data
            for name, data in objects.items()
            if name == f"{root}head.json" or name.startswith(f"{root}records/")
        )

        def counts(name: str) -> bool:
            top, _, rest = name.removeprefix(root).partition("/")
            if not name.startswith(root) or top not in ("work", "state", "records", "tables"):
                return True
            return top != "work" and rest.encode() in named

        kept = {name: data for name, data in objects.items() if counts(name)}
        beside = [path for top in self.more.values() for path in Path(top).rglob("*")]
        return kept | {str(path): path.read_bytes() for path in beside if path.is_file()}

    def lose_lock(self) -> None:
        """There is none: whoever comes takes over."""


class Hdfs(Bucket):
    """A place in HDFS, but for Spark's own log, which is in a directory."""

    def __init__(self, url: str, directory: Path):
        super().__init__(url, "", {}, directory)
        self._store = open_store(url, "path")

    def _objects(self) -> dict[str, bytes]:
        return {entry.key: self._store.get(entry.key).data for entry in self._store.list()}

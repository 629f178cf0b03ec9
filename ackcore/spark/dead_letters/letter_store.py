"""A store of dead letters: objects, and an index of the objects that are valid.

``index.json`` lists the files of each spout with lengths and checksums, the notes of letters that
were sent again or dropped, the requests that no query has taken, and the checkpoint that owns the
store. Each step replaces the index with one conditional put (`SharedRecord`), after the puts of the
new objects. So the letters of a micro-batch become visible together, and a repeated step replaces
its own letters. Only the check of a start depends on a listing, which may lag: `newer_files`.

A driver that opens the store writes its token into the index, and may write while the token is
there. The next step of the previous driver is refused. `drop` and `replay` write beside the driver:
each change is applied to the present index, so none undoes another. Only the driver removes
requests from the index, in `ackcore.spark.checkpoint.requests`, which checks the owner of the
checkpoint instead.

Keys contain random bits and the epoch, which grows each time a driver opens the store. An object of
an earlier epoch that no index names was left by a process that died. No process can add it to the
index any more, because the index version for that put is gone. The driver that opens the store
deletes such objects.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pyarrow as pa

from ackcore.spark.base.checksummed import check_size, checksum_in, digest_of
from ackcore.spark.base.clocks import wall_clock_ms
from ackcore.spark.base.errors import CheckpointInUse, StateError, corrupt
from ackcore.spark.base.letter_columns import schema_of, write_letters
from ackcore.spark.base.lock import process_name
from ackcore.spark.checkpoint.requests import REQUESTS, spout_of_request, write_request
from ackcore.spark.checkpoint.shared_record import INDEX, Body, SharedRecord, object_of, put_object
from ackcore.spark.dead_letters.letter_files import (
    GIVEN_UP,
    FileGroup,
    Fill,
    LetterFile,
    NewFile,
    NotesChanged,
    ObjectFile,
    Objects,
    batches_of,
    position_of,
    read_schema,
)
from ackcore.spark.stores.interface import Store
from ackcore.spark.stores.run_files import adopt_object, is_beside, made_for, remove_abandoned

#: Largest note, in bytes, that is kept in the index. A larger one is an object of its own.
_LARGE = 2000
#: Prefixes of the lists of merged files, and of notes.
_MERGED, _NOTES = ".merged", ".notes"
#: Keys of ackcore's in the store, which may be swept if their epoch is an earlier one.
_OURS = re.compile(
    r"[^/]+/(?:batch-\d+(?:\.\d+)?|batches-\d+-\d+\.\d+|columns)\.e(\d+)\.[0-9a-f]{24}\.parquet"
    r"|(?:\.merged|\.notes)/e(\d+)/[0-9a-f]{24}|\.requests/e(\d+)\.[0-9a-f]{8}/.+"
)
#: Largest file, in bytes, that is cached after its put.
_SMALL = 1 << 20
#: Number of tasks' files that are copied in parallel.
_AT_ONCE = 16
#: Attempts to rewrite a file while drivers start.
_TRIES = 10
#: The end of an error about letters that are newer than their checkpoint.
NEWER_LETTERS = (
    "Restore the checkpoint and the letters from one backup; or move the letters away, where "
    "dead_letters() still reads them, and set dead_letters= to a new directory"
)


class Letters:
    """A store of dead letters, on a file system or in a bucket.

    It keeps the index that it has read; `refresh` reads the index again. After `own`, writes raise
    CheckpointInUse if another driver has taken over.
    """

    def __init__(self, store: Store) -> None:
        self.url = store.url
        self.store = store
        self._index = SharedRecord(store, INDEX)
        self.objects = Objects(store, self._now)
        self._token = ""
        #: The notes and the epoch of the last read.
        self._seen: tuple[Collection[str], int | None] = (), None

    def __repr__(self) -> str:
        return f"Letters({self.url!r})"

    def refresh(self) -> None:
        """Read the index again; other methods use the index as last read or replaced."""
        self._index.load()

    # -- owner --------------------------------------------------------------------------------

    def owner(self) -> dict[str, Any] | None:
        """Return what `own` recorded about the store's checkpoint; None if no driver called it."""
        return self._index.read().get("owner")

    def own(self, about: Mapping[str, str], check_owner: Callable[[], object]) -> None:
        """Let this driver write to the store; writes of earlier drivers raise from now on.

        Files that dead drivers left are deleted. ``about``: what `owner` returns from now on:
        ``checkpoint``, a path or URL, and ``deployment_key``, 16 hex digits. ``check_owner``:
        raises if another driver has taken over the checkpoint.
        """
        token = secrets.token_hex(16)

        def take(body: Body) -> Body | None:
            if body.get("token") == token:
                return None
            # After the read of the index: a driver that takes over from now on replaces the
            # index before or after this replacement, and is not refused because of it.
            check_owner()
            epoch = body.get("epoch", 0) + 1
            by = {"epoch": epoch, "token": token, "holder": process_name()}
            return {"spouts": {}, "notes": {}, "requests": {}, **body, "owner": dict(about), **by}

        self._index.replace(take)
        self._token = token
        self._sweep()

    def newer_files(self, done: int) -> list[str]:
        """Return the keys of files that the index lacks because an older version of it came back.

        Their last micro-batch is at most ``done``, the last one that is done, and later than all
        that the index has of their spout. Files that were merged or given up are left out. Files of
        later micro-batches may be left by a driver that died.
        """
        keys = {entry.key for entry in self.store.list()}
        last = {spout: file.last for spout, file in files_of(self)}  # of the spout's last file
        found = (ObjectFile(self.objects, key, 0, "") for key in sorted(keys) if _epoch_in(key) > 0)
        newer = [
            file.key
            for file in found
            if last.get(file.key.partition("/")[0], -1) < batches_of(file)[1] <= done
            and f"{file.key}{GIVEN_UP}" not in keys
        ]
        merged = self._merged_keys(_merged(self._index.read())) if newer else set()
        return [key for key in newer if key not in merged]

    def _sweep(self) -> None:
        """Delete objects that no index names, left by processes that died.

        Files that a user gave up with a marker (`GIVEN_UP`), and their markers, are deleted too.
        """
        remove_abandoned(self.store)
        keys = [entry.key for entry in self.store.list()]
        markers = {key for key in keys if key.endswith(GIVEN_UP)}
        lost = {key.removesuffix(GIVEN_UP) for key in markers}

        def without_lost(body: Body) -> Body:
            for spout in body["spouts"]:
                files = _of_spout(body, spout)["files"]
                left = [each for each in files if each["object"] not in lost]
                body = _with(body, spout, files=left)
            return body

        if lost:
            self._change(without_lost)
        body = self._index.read()
        named = {each["object"] for each in _named(body)} | self._merged_keys(_merged(body))
        self._delete(
            key for key in keys if key not in named and 0 <= _epoch_in(key) < body["epoch"]
        )
        self._delete(markers)  # after their files: see `newer_files`

    def _change(self, change: Callable[[Body], Body | None]) -> None:
        def checked(body: Body) -> Body | None:
            if self._token and not body:
                raise corrupt(f"{self.url}/{INDEX}", "was removed while this driver used it")
            if self._token and body["token"] != self._token:
                raise CheckpointInUse(
                    f"{self.url} was taken over from this driver by another ({body['holder']}). "
                    "All that this driver recorded before is kept, and it writes nothing more; let "
                    "the other driver run, or stop it and start this query again"
                )
            return change(body)

        self._index.replace(checked)

    # -- files --------------------------------------------------------------------------------

    def spouts(self) -> list[str]:
        """Return the spouts that have letters or recorded columns, sorted."""
        spouts = self._index.read().get("spouts", {})
        return sorted(name for name, of in spouts.items() if of["files"] or of["columns"])

    def files(self, spout: str) -> list[LetterFile]:
        """Return the valid files of a spout, in the order of their micro-batches."""
        found = _of_spout(self._index.read(), spout)["files"]
        return [self._file(each, after) for each, after in zip_longest(found, found[1:])]

    def _file(self, entry: Mapping[str, Any], after: Mapping[str, Any] | None) -> LetterFile:
        path = self._path(entry)
        if after is not None and after["first"] == entry["first"]:
            path = replace(path, end=position_of(self._path(after)))
        return LetterFile(path, entry["first"], entry["last"], entry["level"])

    def _path(self, entry: Mapping[str, Any]) -> ObjectFile:
        return ObjectFile(self.objects, entry["object"], entry["bytes"], entry["checksum"])

    def _now(self, file: ObjectFile) -> ObjectFile | None:
        """Return the file that has replaced a missing one or has its letters, or None."""
        spout = file.key.partition("/")[0]
        first, last = batches_of(file)
        # A new record: the index read before stays unchanged, so that it is of one moment.
        index = SharedRecord(self.store, INDEX).load()
        for each in _of_spout(index, spout)["files"]:
            same = _name(each["object"]) == _name(file.key)
            if same or (each["level"] and each["first"] <= first <= last <= each["last"]):
                return self._path(each)
        return None

    def columns(self, spout: str) -> ObjectFile | None:
        """Return the file with the columns of a spout's source; None if none are recorded."""
        found = _of_spout(self._index.read(), spout)["columns"]
        return None if found is None else self._path(found)

    def remember_columns(self, sources: Mapping[str, pa.Schema]) -> None:
        """Record the sources' columns in place of all recorded columns; {} changes nothing."""
        written: dict[str, Any] = {}
        for spout, schema in sources.items():
            letters, path = schema_of(schema), self.columns(spout)
            try:
                known = path is not None and read_schema(path).equals(letters)
            except StateError:
                known = False
            if not known:
                fill = partial(write_letters, schema=letters, tables=())
                written[spout] = self._put(spout, "columns", fill)

        def change(body: Body) -> Body:
            for spout in {*body["spouts"], *written} if sources else ():
                known = _of_spout(body, spout)["columns"]
                now = written.get(spout, known) if spout in sources else None
                body = _with(body, spout, columns=now)
            return body

        spouts = self._index.read()["spouts"]
        others = any(of["columns"] for name, of in spouts.items() if name not in sources)
        if written or (sources and others):
            self._change(change)

    def _put(
        self, spout: str, name: str, fill: Fill, there: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Write a file of letters, and return the entry for it that the index is to get.

        ``name``: the file's name before its epoch. ``fill``: writes the content. ``there``: an
        entry of the index. If its file has these bytes, or had before a drop, it is returned, and
        nothing is written.
        """
        with made_for(self.store) as path:
            with open(path, "wb") as file:
                fill(file)
            with pa.memory_map(str(path)) as source:
                size, digest = source.size(), digest_of(source.read_buffer())
            if there is not None and digest in (there["checksum"], there.get("written")):
                return dict(there)
            small = path.read_bytes() if size <= _SMALL else None
            key = self._new_key(spout, name, digest)
            self.store.put_file(key, path)
        if small is not None:
            self.objects.keep(key, pa.py_buffer(small))
        return {"object": key, "bytes": size, "checksum": digest}

    def _new_key(self, spout: str, name: str, digest: str) -> str:
        epoch = self._index.read()["epoch"]
        return f"{spout}/{name}.e{epoch}.{secrets.token_hex(4)}{digest[:16]}.parquet"

    def publish(self, spout: str, number: int, new: Sequence[NewFile]) -> None:
        """Write the letters of a micro-batch, and replace any earlier ones of that micro-batch.

        This takes two bucket requests in sequence, or none if the letters are already there. Files
        that tasks wrote are linked, or copied within the bucket. Copying takes one more request per
        file; many run in parallel. Raises CheckpointCorrupt if notes name the letters to replace.
        """
        files = _of_spout(self._index.read(), spout)["files"]
        there = [each for each in files if each["first"] == number]
        known = {_name(each["object"]): each for each in there}
        # The first parts of their keys.
        parts = {
            f"batch-{number}.{one.position}" if one.position else f"batch-{number}": one
            for one in new
        }
        with ThreadPoolExecutor(_AT_ONCE) as beside:
            copies = {
                name: beside.submit(self._copied, spout, name, one, known.get(name))
                for name, one in parts.items()
                if one.source is not None and is_beside(one.source, self.store)
            }
            put = [
                copies[name].result()
                if name in copies
                else self._put(spout, name, one.fill, known.get(name))
                for name, one in parts.items()
            ]
        keys = [each["object"] for each in put]
        if keys == [each["object"] for each in there]:
            return
        lost = {each["object"] for each in there} - {*keys}
        if lost:
            self.refresh()  # other processes may have added notes
        if lost and any(str(number) in note["rows"].get(spout, ()) for _, note in self.notes()):
            what = (
                f"has letters of micro-batch {number} that were sent again or dropped, and the "
                "checkpoint has others: the dead letters are newer than the checkpoint"
            )
            raise corrupt(self._path(there[0]), what, NEWER_LETTERS)
        entries = [{**each, "first": number, "last": number, "level": 0} for each in put]
        gone: set[str] = set()

        def change(body: Body) -> Body:
            files = _of_spout(body, spout)["files"]
            before = [each for each in files if each["last"] < number]
            after = [each for each in files if each["first"] > number]
            gone.clear()
            gone.update(each["object"] for each in files if each["first"] == number)
            return _with(body, spout, files=[*before, *entries, *after])

        self._change(change)
        self._delete(gone - {*keys})

    def _copied(
        self, spout: str, name: str, new: NewFile, there: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Link or copy a task's file into the store, and return the entry for the index.

        The file is on the same storage, and its checksum is in its name. This checks its length;
        the reader checks its checksum. ``name``: the file's name before its epoch. ``there``: an
        entry of the index, which is returned if its file has these bytes, or had before a drop.
        """
        assert new.source is not None
        digest = checksum_in(new.source)
        assert digest is not None, f"{os.fspath(new.source)} has no checksum in its name"
        if there is not None and digest in (there["checksum"], there.get("written")):
            return dict(there)
        key = self._new_key(spout, name, digest)
        size = adopt_object(new.source, self.store, key)
        check_size(new.source, size, new.nbytes)
        return {"object": key, "bytes": size, "checksum": digest}

    def merge(self, spout: str, run: list[LetterFile], fill: Fill) -> None:
        """Replace adjacent files by one file; do nothing if one of them is no longer valid.

        `remove_merged` deletes the old files later. ``fill``: writes the new file.
        """
        first, last, level = run[0].first, run[-1].last, run[0].level + 1
        put = self._put(spout, f"batches-{first}-{last}.{level}", fill)
        whole = {**put, "first": first, "last": last, "level": level}
        keys = [file.path.key for file in run]
        epoch = self._index.read()["epoch"]
        merged = put_object(self.store, f"{_MERGED}/e{epoch}", json.dumps(keys).encode())
        done = False

        def change(body: Body) -> Body | None:
            nonlocal done
            files = _of_spout(body, spout)["files"]
            there = [each["object"] for each in files]
            done = whole["object"] in there
            if done or not set(keys) <= set(there):
                return None
            done = True
            at = there.index(keys[0])
            left = [each for each in files if each["object"] not in keys]
            log = [*_of_spout(body, spout)["merged"], {**merged, "at_ms": wall_clock_ms()}]
            return _with(body, spout, files=[*left[:at], whole, *left[at:]], merged=log)

        self._change(change)
        if not done:
            self._delete({put["object"], merged["object"]})

    def remove_merged(self, spout: str, until_ms: float = math.inf) -> None:
        """Delete files that were merged into others before ``until_ms``, in ms since 1970.

        By default all of them are deleted.
        """
        log = _of_spout(self._index.read(), spout)["merged"]
        old = [each for each in log if each["at_ms"] < until_ms]
        if not old:
            return
        lists = {each["object"] for each in old}
        keys = self._merged_keys(old)

        def change(body: Body) -> Body | None:
            log = _of_spout(body, spout)["merged"]
            left = [each for each in log if each["object"] not in lists]
            return None if len(left) == len(log) else _with(body, spout, merged=left)

        # The files first: without their list they could not be found.
        self._delete(keys)
        self._change(change)
        self._delete(lists)

    def _merged_keys(self, logs: Iterable[Mapping[str, Any]]) -> set[str]:
        """Return the keys of the files in some lists of merged files."""
        found = (object_of(self.store, each) for each in logs)
        return {key for data in found if data is not None for key in json.loads(data)}

    def named(self, spout: str, numbers: set[int]) -> list[LetterFile]:
        """Return the files with letters of these micro-batches, by the index as read now.

        This first deletes files that were merged into others: `drop` could not empty their rows.
        Their readers find the letters in the files that replaced them.
        """
        self.refresh()
        self.remove_merged(spout)
        files = self.files(spout)
        return [file for file in files if any(file.first <= n <= file.last for n in numbers)]

    def rewrite(self, spout: str, file: LetterFile, fill: Fill) -> None:
        """Replace a file by one with as many rows and a new key, and delete the former file.

        Nothing changes if the index no longer names the file, or if drivers open the store during
        each of 10 attempts.
        """
        key, done = file.path.key, False
        was = {"written": file.path.digest}
        new: dict[str, Any] = {}
        epoch = -1

        def change(body: Body) -> Body | None:
            nonlocal done
            # A driver that opened the store meanwhile may have swept the new object.
            if body["epoch"] != epoch:
                return None
            files = _of_spout(body, spout)["files"]
            there = [each["object"] for each in files]
            done = new["object"] in there
            if done or key not in there:
                return None
            done = True
            changed = [{**was, **each, **new} if each["object"] == key else each for each in files]
            return _with(body, spout, files=changed)

        for _ in range(_TRIES):
            epoch = self._index.read()["epoch"]
            new = self._put(spout, _name(key), fill)
            self._change(change)
            self._delete({key if done else new["object"]})
            if done or self._index.read()["epoch"] == epoch:
                break

    def has(self, spout: str, file: LetterFile) -> bool:
        """Return whether the index, which is read again, still names a file."""
        self.refresh()
        return file.path.key in {each.path.key for each in self.files(spout)}

    def _delete(self, keys: Iterable[str]) -> None:
        some = sorted(keys)
        if some:
            self.store.delete(some)

    # -- requests -----------------------------------------------------------------------------

    def requested(self) -> list[str]:
        """Return the names of the replay requests in the index, sorted."""
        return sorted(self._index.read().get("requests", {}))

    def send(
        self, request: str, note: Mapping[str, Any], tables: Mapping[str, Iterable[pa.Table]]
    ) -> None:
        """Add a request that sends letters again: all letters of its note, or none.

        Raises NotesChanged if another process added a note or opened the store after `notes`.

        ``request``: its id. ``note``: the fields of a `Note`. ``tables``: by spout the records, in
        the columns of `TRACKING` and of the source.
        """
        requests = {}
        with tempfile.TemporaryDirectory(prefix="ackcore-") as place:
            for spout, some in tables.items():
                name = write_request(Path(place), request, spout, some)
                requests[name] = self._put_request(name, Path(place, name))
        self.add_note(request, note, requests)

    def _put_request(self, name: str, path: Path) -> dict[str, Any]:
        """Move a request's file into the store, and return its entry for `add_note`."""
        epoch = self._index.read()["epoch"]
        key = f"{REQUESTS}/e{epoch}.{secrets.token_hex(4)}/{name}"
        self.store.put_file(key, path)
        return {"object": key}  # its name contains its checksum

    def withdrawn(self) -> set[tuple[str, str]]:
        """Return the withdrawn requests, each with its spout."""
        names = self._index.read().get("withdrawn", [])
        return {(name.partition(".")[0], spout_of_request(name)) for name in names}

    # -- notes --------------------------------------------------------------------------------

    def notes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each request's id and `Note`, as a dict. Iterate before `send` and `add_note`.

        Raises CheckpointCorrupt if a note is missing or damaged.
        """
        body = self._index.read()
        notes = body.get("notes", {})
        self._seen = notes.keys(), body.get("epoch")
        for request, note in notes.items():
            if "body" in note:
                yield request, note["body"]
                continue
            data = object_of(self.store, note)
            if data is None:
                where = f"{self.url}/{note['object']}"
                raise corrupt(where, f"is missing or damaged, though {INDEX} names it")
            yield request, json.loads(data)

    def add_note(
        self,
        request: str,
        body: Mapping[str, Any],
        requests: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Add a note to the index, together with the entries of its replay requests.

        Raises NotesChanged if the notes or the epoch are not those of the last call of `notes`.
        """
        data = json.dumps(body).encode()
        stamp = {"token": secrets.token_hex(8)}
        note: dict[str, Any] = {"body": dict(body), **stamp}
        if len(data) > _LARGE:
            epoch = self._index.read()["epoch"]
            note = {**put_object(self.store, f"{_NOTES}/e{epoch}", data), **stamp}

        def change(index: Body) -> Body | None:
            found = index["notes"].get(request)
            if found is not None and found["token"] == stamp["token"]:
                return None
            # In a later epoch the driver may have swept the objects that were put before.
            if (index["notes"].keys(), index["epoch"]) != self._seen:
                raise NotesChanged(
                    f"{self.url}: meanwhile another process sent letters again, dropped some, or "
                    "started a query that writes here. Try again"
                )
            whole = {**index["requests"], **(requests or {})}
            return {**index, "notes": {**index["notes"], request: note}, "requests": whole}

        self._change(change)


def _name(key: str) -> str:
    """Return the part of a key with the micro-batches and the first letter's position."""
    return key.rpartition("/")[2].partition(".e")[0]


def _of_spout(body: Body, spout: str) -> dict[str, Any]:
    nothing: dict[str, Any] = {"columns": None, "files": [], "merged": []}
    return {**nothing, **body.get("spouts", {}).get(spout, {})}


def _with(body: Body, spout: str, **changes: Any) -> Body:
    """Return a copy of an index with other fields for a spout."""
    return {**body, "spouts": {**body["spouts"], spout: {**_of_spout(body, spout), **changes}}}


def _merged(body: Body) -> Iterator[Mapping[str, Any]]:
    for spout in body.get("spouts", ()):  # there may be no index
        yield from _of_spout(body, spout)["merged"]


def _named(body: Body) -> Iterator[Mapping[str, Any]]:
    """Yield the entries of all objects that an index names."""
    for spout in body["spouts"]:
        of = _of_spout(body, spout)
        yield from of["files"]
        if of["columns"] is not None:
            yield of["columns"]
    yield from _merged(body)
    yield from (note for note in body["notes"].values() if "object" in note)
    yield from body["requests"].values()


def _epoch_in(key: str) -> int:
    """Return the epoch in a key of ackcore's, or -1 for any other key."""
    found = _OURS.fullmatch(key)
    return -1 if found is None else int(found[1] or found[2] or found[3])


# -- of all spouts --------------------------------------------------------------------------------


def files_of(store: Letters, spout: str | None = None) -> list[tuple[str, LetterFile]]:
    """Return the valid files of one spout, or of all for None, each with its spout."""
    spouts = store.spouts() if spout is None else [spout]
    return [(name, file) for name in spouts for file in store.files(name)]


def kinds_of(store: Letters, spout: str | None) -> list[FileGroup]:
    """Return the valid files of one spout, or of all for None, grouped by columns."""
    kinds: dict[tuple[str, pa.StructType], list[LetterFile]] = {}
    for name, file in files_of(store, spout):
        kinds.setdefault((name, read_schema(file.path).field("payload").type), []).append(file)
    return [FileGroup(name, files) for (name, _), files in kinds.items()]

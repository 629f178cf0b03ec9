"""The promises of every store; and the store in a bucket when S3 fails."""

import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import copy
from datetime import timedelta
from pathlib import Path

import pytest
from s3_server import (
    BUSY_DELETED,
    COLLIDED,
    DENIED,
    DENIED_DELETED,
    ERROR,
    ERROR_AFTER,
    LOST,
    NOT_DELETED,
    REFUSED,
    SLOW_DOWN,
    TOO_SLOW,
)

from ackcore.spark.base import atomic
from ackcore.spark.base.errors import CheckpointInUse, CheckpointReadOnly, StateError
from ackcore.spark.base.paths import local_path
from ackcore.spark.stores import file_system_store
from ackcore.spark.stores import objects as object_stores
from ackcore.spark.stores.interface import Store, StoreConflict, StoredObject, StoreUnavailable
from ackcore.spark.stores.local import LocalStore
from ackcore.spark.stores.objects import _FIRST_RETRY, _RETRY, ObjectStore, told
from ackcore.spark.stores.opening import is_bucket, open_store, place_of, store_url
from ackcore.spark.stores.run_files import adopt_object, is_beside, object_at
from ackcore.spark.stores.trying import tried

SOON = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=20),
    "backoff": {
        "init_backoff": timedelta(milliseconds=1),
        "max_backoff": timedelta(milliseconds=2),
    },
}


#: Of s3proxy, a JVM that takes seconds to start, in `make test` one test alone is asked.
SECOND = pytest.param("second_bucket", id="s3proxy", marks=pytest.mark.faults)
#: Azurite comes through npm, so it is asked on demand, too.
AZURE = pytest.param("azure_container", id="azure", marks=pytest.mark.faults)


@pytest.fixture(
    params=[
        "local",
        pytest.param("bucket", id="s3"),
        pytest.param("hdfs_place", id="hdfs"),
        SECOND,
        AZURE,
    ]
)
def store(request, tmp_path):
    if request.param == "local":
        return open_store(tmp_path / "below" / "root", "path")
    if request.param == "hdfs_place":
        return open_store(request.getfixturevalue("hdfs_place"), "path")
    return ObjectStore(request.getfixturevalue(request.param), SOON)


@pytest.fixture(params=["s3", pytest.param("second_s3", id="s3proxy", marks=pytest.mark.faults)])
def proxy(request):
    """The proxy before either S3 server, which fails on demand."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def objects(proxy):
    return ObjectStore(f"s3://{proxy.server.new_bucket()}/some/place", SOON)


# -- what all promise ------------------------------------------------------------------------------


def test_it_is_a_store(store):
    assert isinstance(store, Store)


def test_what_was_put_is_there_whole_and_what_was_not_is_not(store):
    assert store.get("a/b") is None
    assert store.read("a/b") is None
    version = store.put("a/b", b"some bytes")
    assert store.get("a/b") == (b"some bytes", version)
    assert bytes(store.read("a/b")) == b"some bytes"
    assert store.get("a") is None  # which is no object, whatever is below it
    assert store.read("a") is None
    assert store.get("a/b/c") is None
    store.put("empty", b"")
    assert store.get("empty").data == bytes(store.read("empty")) == b""


def test_what_is_read_is_aligned(store):
    """Wherever in memory the answer of a server began."""
    for size in (1, 63, 1000, 100_000):
        store.put(f"a/{size}", b"x" * size)
        found = [store.read(f"a/{size}") for _ in range(5)]
        assert [each.address % 64 for each in found] == [0] * 5
        assert {each.size for each in found} == {size}


def test_what_was_read_holds_no_descriptor(tmp_path):
    """A table may have more segments than a process may have open files."""
    store = open_store(tmp_path, "path")
    store.put("a", b"some bytes")
    before = len(os.listdir("/proc/self/fd"))
    found = [store.read("a") for _ in range(20)]
    assert len(os.listdir("/proc/self/fd")) < before + 10
    assert {one.to_pybytes() for one in found} == {b"some bytes"}


def test_a_directory_that_may_not_be_searched_is_an_error(tmp_path, monkeypatch):
    store = open_store(tmp_path, "path")
    store.put("a/f", b"x")

    def denied(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(StateError, match="a/f cannot be read: Permission denied; remove the cause"):
        store.list("a")
    with pytest.raises(CheckpointReadOnly, match=r"a cannot be written .*Permission denied"):
        atomic.remove_temporaries(tmp_path / "a")


def test_a_file_beside_a_store_becomes_an_object_in_the_place_of_what_was(store):
    source = f"{store.url}/a/b"
    with pytest.raises(StateError, match=r"c/d could not be written: No such file|does not exist"):
        adopt_object(source, store, "c/d")
    store.put("a/b", b"some")
    store.put("c/d", b"other")
    assert is_beside(source, store)
    assert adopt_object(source, store, "c/d") == 4
    assert store.get("c/d").data == b"some"
    store.put("a/b", b"")
    assert adopt_object(source, store, "c/d") == 0
    assert store.get("c/d").data == b""


def test_a_version_changes_with_what_is_there(store):
    first = store.put("a", b"1")
    second = store.put("a", b"2")
    assert first != second
    assert store.get("a") == (b"2", second)


def test_only_one_puts_what_must_be_absent(store):
    version = store.put("a/b", b"first", if_absent=True)
    with pytest.raises(StoreConflict, match=r"a/b was not written: another"):
        store.put("a/b", b"second", if_absent=True)
    assert store.get("a/b") == (b"first", version)


def test_only_one_replaces_a_version(store):
    before = store.replace("head", b"0", None)
    with pytest.raises(StoreConflict, match="head was not written: another"):
        store.replace("head", b"another's", None)
    after = store.replace("head", b"1", before)
    with pytest.raises(StoreConflict, match="head was not written: another"):
        store.replace("head", b"another's", before)
    assert store.get("head") == (b"1", after)
    assert store.replace("head", b"2", after) == store.get("head").version
    assert store.list() == [StoredObject("head", 1)]
    store.delete(["head"])
    assert store.get("head") is None
    assert store.list() == []


def test_what_is_not_there_is_not_replaced(store):
    with pytest.raises(StoreConflict, match="was not written: another process has deleted it"):
        store.replace("head", b"1", store.replace("other", b"1", None))
    assert store.get("head") is None


def test_a_put_that_came_about_is_told_by_its_bytes(store):
    """After a lost answer the same put again says that it was done."""
    first = store.put("b", b"mine", if_absent=True)
    assert store.put("b", b"mine", if_absent=True) == first
    first = store.replace("a", b"mine", None)
    assert store.replace("a", b"mine", None) == first
    second = store.replace("a", b"mine too", first)
    assert store.replace("a", b"mine too", first) == second


@pytest.mark.parametrize("condition", ["absent", "first", "version"])
def test_of_many_that_put_at_once_one_does(store, condition):
    ready = threading.Barrier(4)
    before = store.replace("a", b"before", None) if condition == "version" else None

    def put(n):
        ready.wait()
        with suppress(StoreConflict):
            data = f"of {n}".encode()
            if condition == "absent":
                return store.put("a", data, if_absent=True)
            return store.replace("a", data, before)

    with ThreadPoolExecutor(4) as pool:
        versions = [version for version in pool.map(put, range(4)) if version is not None]
    assert versions == [store.get("a").version]


def test_a_file_becomes_an_object(store, tmp_path):
    content = bytes(range(256)) * 100
    path = tmp_path / "a file"
    path.write_bytes(content)
    store.put_file("rows/some rows-%.arrow", path)
    assert not path.exists()
    assert bytes(store.read("rows/some rows-%.arrow")) == content
    assert store.list() == [StoredObject("rows/some rows-%.arrow", len(content))]


def test_a_file_is_put_where_there_is_none(store, tmp_path):
    def put(content):
        path = tmp_path / "file"
        path.write_bytes(content)
        store.put_file("a", path, if_absent=True)
        return not path.exists()

    assert put(b"rows")
    assert put(b"rows")
    with pytest.raises(StoreConflict):
        put(b"other")
    assert store.get("a").data == b"rows"


def test_a_list_is_of_what_is_below_a_prefix(store):
    for key in ("b/2", "b/1/x", "bb/1", "a"):
        store.put(key, key.encode())
    assert store.list() == [("a", 1), ("b/1/x", 5), ("b/2", 3), ("bb/1", 4)]
    assert store.list("b") == [("b/1/x", 5), ("b/2", 3)]
    assert store.list("c") == []


def test_what_is_deleted_is_gone_and_twice_is_fine(store):
    for key in ("b/2", "b/1/x", "c"):
        store.put(key, b"")
    store.delete(["b/1/x", "b/2", "never there"])
    store.delete(["b/1/x"])
    store.delete([])
    assert store.list() == [("c", 0)]
    store.put("b/1/x", b"again")
    assert store.get("b/1/x").data == b"again"


@pytest.mark.parametrize(
    "key", ["", "/a", "a//b", "../a", "a/.", "a/", ".a.tmp", "b/000000000012.version"]
)
def test_a_key_is_a_plain_relative_path(store, key):
    for call in (store.get, store.read, lambda key: store.put(key, b"")):
        with pytest.raises(ValueError, match="key must"):
            call(key)


def test_it_is_pickled_by_its_place_alone(store):
    store.put("a", b"1")
    again = pickle.loads(pickle.dumps(store))
    assert again.get("a").data == b"1"
    assert again.url == store.url


# -- on a file system ------------------------------------------------------------------------------


def test_nothing_gets_its_name_once_another_driver_has_taken_over(tmp_path):
    store = LocalStore(tmp_path)
    version = store.replace("head", b"1", None)
    (tmp_path / "file").write_bytes(b"rows")

    def taken_over():
        raise CheckpointInUse("taken over")

    with atomic.fenced(taken_over):
        for put in (
            lambda: store.put("a", b""),
            lambda: store.put("a", b"", if_absent=True),
            lambda: store.replace("head", b"2", version),
            lambda: store.put_file("a", tmp_path / "file"),
        ):
            with pytest.raises(CheckpointInUse, match="taken over"):
                put()
    assert store.get("head") == (b"1", version)
    assert store.get("a") is None


@pytest.fixture(params=["local", pytest.param("hdfs_place", id="hdfs")])
def files(request, tmp_path):
    """A store on a file system."""
    local = request.param == "local"
    return open_store(tmp_path if local else request.getfixturevalue(request.param), "path")


def names(store):
    """The names of all files, those that are being written included."""
    return [name for name, _, _ in store._files("")]


def test_directories_go_with_what_is_in_them_and_come_with_what_is_put(files):
    def put(n):
        for i in range(4):
            files.put(f"a/b/{n}-{i}", b"")
            files.delete([f"a/b/{n}-{i}"])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(put, range(3)))
    assert files.list() == []
    assert files._names("") == []


@pytest.mark.parametrize("exists", [True, False])
def test_a_writer_that_slept_replaces_nothing(files, exists):
    """The number that it gives its version is free again: that version was removed since."""
    version = files.replace("head", b"0", None) if exists else None
    others, write = copy(files), files._write_file

    def slept(*version_of):
        now = version
        while now != "4":
            now = others.replace("head", b"new", now)
        write(*version_of)

    files._write_file = slept
    with pytest.raises(StoreConflict):
        files.replace("head", b"late", version)
    assert others.get("head") == (b"new", "4")
    assert others.replace("head", b"3", "4") == "5"
    assert names(others) == ["head/000000000004.version", "head/000000000005.version"]


def test_an_object_that_was_deleted_is_not_replaced(files):
    version, others, write = files.replace("head", b"0", None), copy(files), files._write_file

    def deleted(*version_of):
        others.delete(["head"])
        write(*version_of)

    files._write_file = deleted
    with pytest.raises(StoreConflict):
        files.replace("head", b"late", version)
    assert others.get("head") is None


def test_a_version_that_is_removed_while_it_is_read_is_read_anew(files):
    now, look = files.replace("head", b"0", None), files._versions

    def late(key):
        nonlocal now
        files._versions = look
        found = look(key)
        for n in (1, 2, 3):
            now = files.replace("head", b"%d" % n, now)
        return found

    files._versions = late
    assert files.get("head") == (b"3", "4")


def test_what_is_being_written_is_not_listed_and_goes_after_an_hour(files, monkeypatch):
    files.replace("a", b"2", files.replace("a", b"1", None))
    files._write_file(".b.0123.tmp", b"half", once=True)
    files.remove_abandoned()
    assert files.list() == [("a", 1)]
    assert len(names(files)) == 3  # its writer may live
    monkeypatch.setattr(file_system_store, "_ABANDONED_S", -60)
    files.remove_abandoned()
    assert names(files) == ["a/000000000001.version", "a/000000000002.version"]


def test_an_unreadable_file_is_an_error_and_not_absent(tmp_path):
    store = LocalStore(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    for read in (store.get, store.read):
        with pytest.raises(StateError, match="loop cannot be read"):
            read("loop")


# -- in a bucket that fails ------------------------------------------------------------------------


@pytest.mark.parametrize("how", [LOST, ERROR_AFTER])
def test_a_put_whose_answer_is_lost_is_found_out(objects, proxy, how):
    proxy.fail(how, "PUT")
    first = objects.replace("head", b"1", None)
    assert objects.get("head") == (b"1", first)
    proxy.fail(how, "PUT")
    second = objects.replace("head", b"2", first)
    assert objects.get("head") == (b"2", second)


@pytest.mark.parametrize("how", [LOST, ERROR_AFTER])
def test_a_put_whose_answer_is_lost_and_that_another_replaced_is_a_conflict(objects, proxy, how):
    """Whoever replaced it has built upon it: this one is out."""
    before = objects.put("head", b"0")
    puts = []

    def replaced_by_another(request):
        puts.append(request.method)
        if len(puts) == 2:  # whether that is the same once more, or the look
            proxy.before = None
            version = objects.get("head").version
            objects.replace("head", b"another's", version)

    proxy.before = replaced_by_another
    proxy.fail(how, "PUT")
    with pytest.raises(StoreConflict):
        objects.replace("head", b"mine", before)
    assert objects.get("head").data == b"another's"


@pytest.mark.parametrize("how", [REFUSED, ERROR, SLOW_DOWN])
def test_what_did_not_go_through_is_sent_again(objects, proxy, how):
    proxy.fail(how, lambda _: True, times=2)
    version = objects.put("head", b"1", if_absent=True)
    proxy.fail(how, "PUT", times=2)
    version = objects.replace("head", b"2", version)
    proxy.fail(how, "GET", times=2)
    assert objects.get("head") == (b"2", version)
    proxy.fail(how, "GET", times=2)
    assert objects.list() == [("head", 1)]
    proxy.fail(how, "POST", times=2)
    objects.delete(["head"])
    assert objects.list() == []


def test_a_put_that_meets_another_request_is_sent_again(objects, proxy, monkeypatch):
    """A 409 of S3 is no answer about the object; obstore reports that the object exists."""
    monkeypatch.setattr(object_stores, "_PAUSES_S", (0, 0))
    version = None
    for data in (b"1", b"2"):
        proxy.fail(COLLIDED, "PUT", times=2)
        version = objects.replace("head", data, version)
    proxy.fail(COLLIDED, "PUT", times=2)
    version = objects.put("head", b"3")
    assert objects.get("head") == (b"3", version)
    for request in (
        lambda: objects.put("other", b"4", if_absent=True),
        lambda: objects.replace("head", b"4", version),
        lambda: objects.delete(["head"]),
    ):
        proxy.fail(COLLIDED, lambda _: True, times=3)
        with pytest.raises(StoreUnavailable, match="another request for it was in pr") as error:
            request()
        assert error.type is StoreUnavailable
        assert "AKIA" not in str(error.value)
    assert objects.list() == [("head", 1)]


def test_a_change_whose_bytes_came_too_slowly_is_sent_again(objects, proxy, monkeypatch, tmp_path):
    """S3 answers 400 and expects a repetition, but obstore does not repeat the request."""
    monkeypatch.setattr(object_stores, "_PAUSES_S", (0, 0))
    (tmp_path / "file").write_bytes(b"3")
    version = objects.replace("head", b"0", None)
    for change in (
        lambda: objects.replace("head", b"1", version),
        lambda: objects.put("head", b"2"),
        lambda: objects.replace("new", b"1", None),
        lambda: objects.put("other", b"1", if_absent=True),
        lambda: objects.put_file("file", tmp_path / "file"),
        lambda: objects.delete(["file", "other"]),
    ):
        proxy.fail(TOO_SLOW, lambda one: one.method in ("PUT", "POST"), times=2)
        change()
        assert not proxy._faults
    assert objects.list() == [("head", 1), ("new", 1)]
    assert objects.get("head").data == b"2"
    proxy.fail(TOO_SLOW, "PUT", times=3)
    with pytest.raises(StoreUnavailable, match="status 400 RequestTimeout") as error:
        objects.put("head", b"3")
    assert error.type is StoreUnavailable


@pytest.mark.parametrize("how", [NOT_DELETED, BUSY_DELETED])
def test_an_object_that_a_delete_of_many_left_is_deleted_again(objects, proxy, monkeypatch, how):
    """The answer has the status 200. obstore repeats the request only for few codes."""
    monkeypatch.setattr(object_stores, "_PAUSES_S", (0, 0))
    for key in ("a", "b"):
        objects.put(key, b"1")
    proxy.fail(how, "POST", times=2)
    objects.delete(["a", "b"])
    assert objects.list() == []


@pytest.mark.parametrize("how", [REFUSED, SLOW_DOWN])
def test_a_bucket_that_has_answered_may_be_away_for_a_while(s3, monkeypatch, how):
    """For as long as the time allows; one that never answered is given up soon."""
    monkeypatch.setitem(_RETRY, "backoff", SOON["backoff"])
    monkeypatch.setitem(_FIRST_RETRY, "backoff", SOON["backoff"])
    store = ObjectStore(f"s3://{s3.server.new_bucket()}/some/place")
    s3.fail(how, "GET", times=12)
    with pytest.raises(StoreUnavailable):
        store.get("head")
    s3._faults.clear()
    store.put("head", b"1")
    for one in (store, pickle.loads(pickle.dumps(store))):
        s3.fail(how, "GET", times=100)
        assert one.get("head").data == b"1"
        assert not s3._faults


def test_who_is_throttled_for_too_long_is_told_so(objects, proxy):
    proxy.fail(SLOW_DOWN, lambda _: True, times=100)
    said = r"some/place/head could not be written: .*503 SlowDown"
    with pytest.raises(StoreUnavailable, match=said):
        objects.put("head", b"1", if_absent=True)
    assert len(proxy.requests) > 3


def test_a_request_that_takes_too_long_is_told_the_setting(objects, proxy, monkeypatch):
    monkeypatch.setenv("AWS_TIMEOUT", "50ms")
    over = threading.Event()
    proxy.before = lambda request: over.wait(60)
    proxy.fail(REFUSED, lambda _: True, times=100)  # when they are over
    with pytest.raises(StoreUnavailable, match=r"it timed out\. On a slow link set AWS_TIMEOUT"):
        objects.get("head")
    over.set()


def test_a_list_may_lag(objects, proxy):
    """The tests that ask whether anything depends on one have to know that the proxy can do it."""
    objects.put("a", b"")
    assert objects.list() == [("a", 0)]
    proxy.lagging = True
    objects.put("b", b"")
    objects.delete(["a"])
    assert objects.list() == [("a", 0)]
    assert objects.get("a") is None
    assert objects.get("b") is not None


def test_who_may_not_write_is_told_so_without_a_secret(objects, proxy):
    proxy.fail(DENIED, lambda _: True, times=100)
    said = r"cannot be written .*status 403 AccessDenied"
    with pytest.raises(CheckpointReadOnly, match=said) as e:
        objects.put("head", b"1")
    assert e.value.__cause__ is None
    assert e.value.__suppress_context__
    with pytest.raises(StateError, match=r"cannot be read .*403") as read:
        objects.get("head")
    for error in (e, read):
        assert "AKIA" not in str(error.value)


def test_who_may_not_delete_is_told_so_without_the_servers_words(objects, proxy):
    """S3 answers 200, and denies each object by itself."""
    proxy.fail(DENIED_DELETED, "POST")
    said = r"place/a cannot be deleted \(GenericError AccessDenied\)\. .* the rights to read, write"
    with pytest.raises(CheckpointReadOnly, match=said) as error:
        objects.delete(["a"])
    assert "AKIA" not in str(error.value)


def test_a_web_server_is_not_taken_for_an_object_store(s3, monkeypatch):
    """MinIO's console answers each request for an object or a list with its page."""
    page = b'<!doctype html><html><head><link href="a.css"/></head><body></body></html>'
    about = [("Content-Type", "text/html"), ("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")]
    store, lists = (ObjectStore(f"s3://{s3.server.new_bucket()}/x", SOON) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr(s3, "_forward", lambda *_: (200, about, page))
        for asked in (
            lambda: store.get("head"),
            lambda: store.read("head"),
            lambda: list(lists.list_versions()),
        ):
            with pytest.raises(StateError, match="x: a web server answers, which is not an obj"):
                asked()
    # For an empty place, the store looks for a web server only once.
    for _ in range(2):
        assert list(lists.list_versions()) == []
    assert [request.method for request in s3.requests[-3:]] == ["GET", "HEAD", "GET"]


def test_a_bucket_that_is_not_there_is_said_to_be_missing(proxy):
    store = ObjectStore("s3://no-such-bucket/x", SOON)
    said = "no-such-bucket/x/a cannot be written: there is no such bucket"
    with pytest.raises(StateError, match=said):
        store.put("a", b"")


def test_large_objects_go_and_come_in_parts(objects, proxy, tmp_path, monkeypatch):
    for module in ("objects", "interface"):
        monkeypatch.setattr(f"ackcore.spark.stores.{module}.PIECE_BYTES", 5 << 20)
    content = b"0123456789abcdef" * (20 << 16)
    path = tmp_path / "large"
    path.write_bytes(content)
    proxy.fail(ERROR, lambda request: "partNumber=2" in request.path)
    objects.put_file("large", path)
    assert any("partNumber=3" in request.path for request in proxy.requests)
    assert bytes(objects.read("large")) == content

    def lacks_a_folder():
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr("tempfile.TemporaryFile", lacks_a_folder)
    with pytest.raises(FileNotFoundError, match="no usable temporary"):  # the object is not missing
        objects.read("large")


def test_a_large_file_is_put_where_there_is_none(objects, monkeypatch, tmp_path):
    """In parts, which take no condition: it is looked at before."""
    monkeypatch.setattr("ackcore.spark.stores.objects._CONDITIONAL_BYTES", 10)
    path = tmp_path / "large"
    for content in (b"x" * 11, b"y" * 11):
        path.write_bytes(content)
        with suppress(StoreConflict):
            objects.put_file("a", path, if_absent=True)
    assert objects.get("a").data == b"x" * 11
    assert path.exists()


def test_each_call_is_a_round_trip(objects, proxy, tmp_path):
    """Beside it, a put that is refused looks what is there."""
    version = objects.put("head", b"1")
    objects.replace("head", b"2", version)
    with suppress(StoreConflict):
        objects.replace("head", b"3", version)
    objects.get("head")
    objects.read("head")
    objects.list()
    objects.delete(["head", "other"])
    path = tmp_path / "file"
    path.write_bytes(b"rows")
    objects.put_file("file", path)
    path.write_bytes(b"rows")
    objects.put_file("other", path, if_absent=True)
    assert len(proxy.requests) == 10


def test_pages_of_a_list_are_all_read(objects, monkeypatch):
    monkeypatch.setattr("ackcore.spark.stores.objects._PAGE", 3)
    for n in range(7):
        objects.put(f"{n}", b"")
    assert [entry.key for entry in objects.list()] == [str(n) for n in range(7)]
    objects.delete([entry.key for entry in objects.list()])
    assert objects.list() == []


# -- what is shown of it ---------------------------------------------------------------------------


def test_no_secret_is_in_what_is_shown_or_pickled(objects):
    objects.put("a", b"1")
    for shown in (repr(objects), str(vars(objects)), repr(pickle.dumps(objects)), objects.url):
        assert "a-secret-of-the-tests" not in shown
        assert "AKIA" not in shown


def test_of_a_failure_the_status_is_told_and_not_what_the_server_says(monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=verysecret")
    text = "Error performing PUT http://h/k?sv=1&sig=verysecret in 1ms - HTTP error: connect"
    assert told(OSError(text)) == (
        "OSError: Error performing PUT http://h/k?... in 1ms - HTTP error: connect"
    )
    assert "verysecret" not in told(OSError("the token sig=verysecret is bad"))
    body = "status code: 403 Forbidden: <Error><Code>Signature</Code><AWSAccessKeyId>AKIA</A>"
    assert told(OSError(f"Server returned non-2xx {body}")) == "OSError, status 403 Signature"


def test_of_a_connection_that_fails_the_cause_is_told_whole():
    long = f"https://h/{'k' * 150}"
    text = (
        f"Generic S3 error: Error performing GET {long} in 9ms, after 10 retries, max_retries: 10, "
        "retry_timeout: 90s  - HTTP error: error sending request\n\nDebug source:\n"
        'HttpError { source: ConnectError("dns", Custom { error: "Name or service not known" }) }'
    )
    assert told(OSError(text)) == (
        f"OSError: Generic S3 error: Error performing GET {long} ... (Name or service not known)"
    )


@pytest.mark.parametrize(
    ("code", "way_out"),
    [
        ("RequestTimeTooSkewed", "Set the clock of this machine"),
        ("QuotaExceeded", "Delete objects that you do not need, or raise the quota"),
        ("InvalidObjectState", "The object was moved to an archive: restore it, and"),
    ],
)
def test_who_is_refused_for_another_cause_than_rights_is_told_the_way_out(code, way_out):
    store, said = ObjectStore("s3://bucket/place"), f"<Code>{code}</Code>"
    for how in ("read", "written"):
        says = rf"{code}\)\. {way_out}"
        with pytest.raises(StateError, match=says) as told, store._asking("head", how):
            raise PermissionError(f"non-2xx status code: 403 Forbidden: <Error>{said}")
        assert "credentials" not in str(told.value)


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("s3://bucket/place", "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"),
        ("gs://bucket/place", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("az://box/place", "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN"),
    ],
)
def test_who_has_no_credentials_is_told_their_names_and_how_to_look(url, names):
    """obstore then asks for those of the machine's role, and fails as if the store had."""
    asked = "Error performing PUT http://169.254.169.254/latest/api/token in 1ms - Server returned "
    store = ObjectStore(url)
    with pytest.raises(StoreUnavailable) as error, store._asking("head"):
        raise OSError(f"{asked}non-2xx status code: 403 Forbidden: no")
    assert f"credentials from the environment ({names}) or the role" in str(error.value)
    assert str(error.value).endswith(f"To find the cause: ackcore doctor {url}")
    expired = "non-2xx status code: 400 Bad Request: <Error><Code>ExpiredToken</Code>"
    says = r"have expired\. Renew them, .* check that they have credentials\."
    with pytest.raises(StoreUnavailable, match=says) as error, store._asking("head"):
        raise OSError(f"Error performing GET http://h/k - Server returned {expired}")
    assert names in str(error.value)
    with pytest.raises(StoreUnavailable) as error, store._asking("head"):
        raise OSError("Error performing GET http://h/k - Server returned non-2xx status code: 500")
    assert "credentials" not in str(error.value)


def test_doctor_tells_what_could_not_be_put_and_not_what_could_not_be_deleted(objects, proxy):
    proxy.fail(DENIED, lambda _: True, times=100)
    with pytest.raises(CheckpointReadOnly, match=r"ackcore-doctor/\w+ cannot be written"):
        next(tried(objects.url))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3a://bucket//a", "s3://bucket/a"),
        ("S3://bucket/a", "s3://bucket/a"),
        ("gs://bucket/a", "gs://bucket/a"),
        ("az://container/a", "az://container/a"),
        (
            "abfss://box@account.dfs.core.windows.net/a",
            "abfss://box@account.dfs.core.windows.net/a",
        ),
    ],
)
def test_a_url_has_one_form(given, kept):
    assert is_bucket(given)
    assert store_url(given, "checkpoint") == kept
    assert open_store(given, "checkpoint").url == kept


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:secret@bucket/a",
        "s3://bucket/a?X-Amz-Signature=secret",
        "az://container/a#secret",
        "abfss://container/a",
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(url):
    with pytest.raises(ValueError, match=r"checkpoint must be .*without user, password") as error:
        store_url(url, "checkpoint")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "https://account.blob.core.windows.net/box/a?sv=1&sig=secret",
        "wasbs://box@account.blob.core.windows.net/a?sig=secret",
        "s3n://key:secret@bucket/a",
        "file://user:secret@host/a",
        Path("https://bucket.s3.amazonaws.com/a?X-Amz-Signature=secret"),
    ],
)
@pytest.mark.parametrize("taken", [place_of, open_store, local_path])
def test_of_a_url_that_is_no_path_the_scheme_alone_is_repeated(url, taken):
    with pytest.raises(ValueError, match=r"checkpoint must ") as error:
        taken(url, "checkpoint")
    told = str(error.value)
    assert os.fspath(url).partition(":")[0] in told
    assert "secret" not in told
    assert "account" not in told


@pytest.mark.parametrize("taken", [place_of, open_store, local_path])
def test_a_path_that_python_cannot_write_is_refused(taken):
    """Without UTF-8, as with LC_ALL=POSIX, these are also letters."""
    said = r"out is '/a/\\ud800', and Python cannot write '\\ud800' in paths: .* is utf-8.*choose"
    with pytest.raises(ValueError, match=said) as raised:
        taken("/a/\ud800", "out")
    assert not isinstance(raised.value, UnicodeError)
    taken("/a/\udcff", "out")  # the byte FF in a name


@pytest.mark.parametrize("taken", [place_of, open_store])
@pytest.mark.parametrize(
    "url", ["s3//bucket/a", "s3:/bucket/a", "s3:bucket/a", Path("s3://bucket/a")]
)
def test_what_is_nearly_a_url_is_no_directory(url, taken):
    with pytest.raises(ValueError, match=r"must be a str that begins with s3:// to name"):
        taken(url, "checkpoint")
    assert place_of("s3/a", "checkpoint") == os.path.abspath("s3/a")


@pytest.mark.parametrize(
    ("url", "form"),
    [("s3://", "s3://bucket/path"), ("abfss:///a", "abfss://container@account.dfs.core.")],
)
def test_a_url_without_a_bucket_is_told_that(url, form):
    with pytest.raises(ValueError, match=f"must name a bucket and a path in it, as {form}"):
        store_url(url, "checkpoint")


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/", "s3://bucket/../a"])
def test_a_url_names_a_place_in_the_bucket(url):
    with pytest.raises(ValueError, match="must name a path in the bucket"):
        store_url(url, "checkpoint")


@pytest.mark.parametrize("character", ["\t", "\n", "\0", "\x7f", "\udce9"])
def test_a_url_has_no_control_characters(character):
    with pytest.raises(ValueError, match="without control characters"):
        store_url(f"s3://bucket/a{character}b/c", "checkpoint")


@pytest.mark.parametrize("place", ["bucket", "hdfs_place"])
@pytest.mark.parametrize("path", ["a b", "a%20b", "%2e%2e/two", "100%", "a+b", "\xe9", "[a]{b}~*'"])
def test_a_path_in_a_url_is_literal(request, place, path):
    root = request.getfixturevalue(place)
    store = open_store(f"{root}/{path}/cp", "checkpoint")
    store.put("state/x", b"1")
    whole, key = object_at(f"{store.url}/state/x")
    assert key.endswith(f"{path}/cp/state/x")
    assert whole.get(key).data == b"1"
    assert [each.key for each in open_store(root, "path").list()] == [f"{path}/cp/state/x"]
    whole.put(key.replace("state/x", "work/y"), b"2")
    assert adopt_object(f"{store.url}/work/y", store, "state/y") == 1
    assert store.get("state/y").data == b"2"
    assert [each.key for each in store.list()] == ["state/x", "state/y", "work/y"]


def test_what_is_no_bucket_is_a_path(tmp_path):
    assert not is_bucket(str(tmp_path))
    assert not is_bucket(tmp_path)
    assert open_store(f"file://{tmp_path}", "path").url == str(tmp_path)
    with pytest.raises(ValueError, match="viewfs"):
        open_store("viewfs://host/path", "path")
    with pytest.raises(ValueError, match="must be a path, or begin with one of s3://"):
        store_url("viewfs://host/path", "path")


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [("s3://b/a", "obstore", "stores"), ("hdfs://there:8020/a", "hdfs_native", "hdfs")],
)
def test_without_its_library_the_error_says_what_to_install(monkeypatch, url, library, extra):
    monkeypatch.setitem(sys.modules, library, None)
    store = open_store(url, "path")
    for ask in (lambda: store.get("b"), lambda: store.put("b", b"")):
        with pytest.raises(ImportError, match=rf"{url} needs .* 'ackcore\[{extra}\]'"):
            ask()

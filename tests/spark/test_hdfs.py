"""The store in HDFS when answers are lost, and when the NameNode or the DataNode is gone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from mini_hdfs import LosesAnswers

from ackcore.spark.base.errors import CheckpointReadOnly, StateError
from ackcore.spark.stores import file_system_store
from ackcore.spark.stores.hdfs import HdfsStore, told
from ackcore.spark.stores.interface import StoreConflict, StoreUnavailable
from ackcore.spark.stores.opening import open_store, store_url
from ackcore.spark.stores.run_files import remove_abandoned
from ackcore.spark.stores.trying import tried

Client = pytest.importorskip("hdfs_native").Client


@pytest.fixture
def store(hdfs_place):
    return open_store(hdfs_place, "path")


def names(store):
    """The names of all files, those that are being written included."""
    return [key for key, _, _ in store._files("")]


# -- lost answers ----------------------------------------------------------------------------------


@pytest.fixture
def proxy(hdfs):
    with closing(LosesAnswers(hdfs.host)) as made:
        yield made


@pytest.fixture
def behind(proxy, store):
    """The same store, through the proxy."""
    return HdfsStore(store.url.replace(store.url.split("/")[2], proxy.host))


#: After this loss hdfs-native waits for 15 seconds.
ADD_BLOCK = pytest.param("addBlock", marks=pytest.mark.faults)


@pytest.mark.parametrize("method", ["create", ADD_BLOCK, "complete", "rename2"])
@pytest.mark.parametrize("how", ["put", "if absent", "replace"])
def test_a_put_whose_answer_is_lost_is_resolved(store, behind, proxy, method, how):
    proxy.lose(method)
    if how == "replace":
        version = behind.replace("a/b", b"mine", None)
    else:
        version = behind.put("a/b", b"mine", if_absent=how == "if absent")
    assert proxy.lost == 1
    assert store.get("a/b") == (b"mine", version)
    store.delete(["a/b"])
    assert names(store) == []


def test_a_rename_whose_answer_is_lost_and_that_another_replaced_is_a_conflict(
    store, behind, proxy
):
    """The next version is the other's, as of a driver that took over meanwhile."""
    first = store.replace("head", b"0", None)
    proxy.lose("rename2", lambda: store.replace("head", b"2", "2"))
    with pytest.raises(StoreConflict, match="head was not written: another process has written it"):
        behind.replace("head", b"1", first)
    assert store.get("head") == (b"2", "3")


def test_a_delete_whose_answer_is_lost_is_repeated(store, behind, proxy):
    store.put("a", b"")
    proxy.lose("delete")
    behind.delete(["a"])
    assert proxy.lost == 1
    assert names(store) == []


# -- writers that sleep or die ---------------------------------------------------------------------


def test_a_file_of_a_dead_writer_is_no_object_and_goes(store, hdfs, monkeypatch):
    store.put("a/b", b"whole")
    path = f"/{store.url.split('/', 3)[3]}/a/.b.0123456789abcdef.tmp"
    dies = (
        "import os, sys; from hdfs_native import Client; "
        "file = Client(sys.argv[1]).create(sys.argv[2]); "
        "file.write(b'half'); file.hsync(); os._exit(9)"
    )
    command = [sys.executable, "-c", dies, f"hdfs://{hdfs.host}", path]
    assert subprocess.run(command).returncode == 9
    assert [entry.key for entry in store.list()] == ["a/b"]
    monkeypatch.setattr(file_system_store, "_ABANDONED_S", -60)
    remove_abandoned(store)
    assert names(store) == ["a/b"]
    assert store.put("a/b", b"again") == store.get("a/b").version


def test_a_forked_process_has_a_client_of_its_own(store):
    store.put("a", b"1")
    child = os.fork()
    if not child:
        os._exit(0 if store.get("a").data == b"1" and len(store._clients) == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_large_object_is_read_in_pieces(store, tmp_path, monkeypatch):
    for each in ("hdfs", "interface"):
        monkeypatch.setattr(f"ackcore.spark.stores.{each}.PIECE_BYTES", 1 << 20)
    content = os.urandom(5 << 19)
    (tmp_path / "file").write_bytes(content)
    store.put_file("a", tmp_path / "file", if_absent=True)
    found = store.read("a")
    assert found.to_pybytes() == content
    assert found.address % 64 == 0
    assert store.copy("a", "b") == len(content)
    assert store.read("b").equals(found)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["no-such-host.invalid:8020", "no-such-nameservice"])
def test_a_wrong_host_is_named_at_once(host):
    with pytest.raises(StoreUnavailable, match=f"'{host}' must be the NameNode's host and port"):
        open_store(f"hdfs://{host}/a", "checkpoint").get("b")


def test_a_name_node_that_does_not_answer_is_named():
    with pytest.raises(StoreUnavailable, match=r"b could not be read: Connection refused.*0\.1:1 "):
        HdfsStore("hdfs://127.0.0.1:1/a", retry_s=0.5).get("b")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("hdfs:///a", "ame a NameNode or nameservice and a path in it, as hdfs://namenode"),
        ("hdfs://host:8020", "ame a path in the NameNode or nameservice, as hdfs://host:80"),
        ("hdfs://user:word@host/a", "without user, password"),
        ("hdfs://host:port/a", "without user, password"),
        ("hdfs://host/a/../b", "without '.' and '..'"),
    ],
)
def test_a_url_names_host_and_place_and_nothing_else(url, words):
    with pytest.raises(ValueError, match=f"^path must .*{words}"):
        store_url(url, "path")


def test_a_user_who_may_not_write_is_told(store, monkeypatch):
    store.put("a", b"1")
    monkeypatch.setenv("HADOOP_USER_NAME", "nobody")
    other = open_store(store.url, "path")
    assert other.get("a").data == b"1"
    with pytest.raises(CheckpointReadOnly, match=r"AccessControlException: .*user=nobody.*Give"):
        other.put("a", b"2")


def test_an_object_below_an_object_is_an_error(store):
    store.put("a", b"1")
    with pytest.raises(StateError, match=r"a/b could not be written: .*not a directory"):
        store.put("a/b", b"2")


def test_of_javas_errors_the_first_line_is_told():
    error = RuntimeError('RPCError("org.apache.Some$Exception", "line: \'x\'.\\n\\tat org.Java")')
    assert told(error) == "Some$Exception: line: 'x'."


def test_the_doctor_finds_the_promises_kept(store):
    found = list(tried(store.url))
    assert [name for name, ok, _ in found if not ok] == []
    assert len(found) == 6
    assert store.list() == []


# -- the NameNode and the DataNode -----------------------------------------------------------------


@pytest.mark.faults
def test_a_name_node_that_restarts_after_a_rename_loses_no_put(own_hdfs):
    """It is killed between the rename and its answer; then it is in safe mode for a while."""
    with closing(LosesAnswers(own_hdfs.host)) as proxy:
        store = HdfsStore(f"hdfs://{proxy.host}/place")
        version = store.replace("head", b"0", None)
        proxy.lose("rename2", lambda: own_hdfs.restart("NameNode"))
        version = store.replace("head", b"1", version)
        assert proxy.lost == 1
        proxy.lose("complete", lambda: own_hdfs.restart("NameNode"))
        store.put("a", b"whole")
        assert proxy.lost == 2
        assert store.get("head") == (b"1", version)
        assert store.get("a").data == b"whole"
        assert {entry.key for entry in store.list()} == {"a", "head"}


@pytest.mark.faults
def test_a_put_waits_for_a_data_node(own_hdfs):
    store = HdfsStore(f"hdfs://{own_hdfs.host}/place")
    store.put("a", b"1")
    own_hdfs.kill("DataNode")
    later = threading.Timer(10, own_hdfs.start, ["DataNode"])
    later.start()
    store.put("b", b"2")
    later.join()
    assert store.get("a").data == b"1"
    assert store.get("b").data == b"2"


@pytest.mark.faults
def test_a_name_node_in_safe_mode_is_told(own_hdfs):
    """After a restart without a DataNode it stays in it."""
    store = HdfsStore(f"hdfs://{own_hdfs.host}/place", retry_s=60)
    store.put("a", b"1")
    own_hdfs.kill("DataNode")
    own_hdfs.restart("NameNode")
    with pytest.raises(StoreUnavailable, match=r"b could not be written: SafeMode.* up and not in"):
        store.put("b", b"2")
    own_hdfs.start("DataNode")
    store.put("b", b"3")
    assert store.get("b").data == b"3"

"""librdkafka's mock cluster: a Kafka in a helper process, all of whose answers can be scripted.

It comes with confluent-kafka's wheel, as ``rd_kafka_mock_*`` of the library that the wheel holds,
and forgets all when it ends.  Run as a program, this file is the helper process, for one cluster
after the other: a line of JSON at its standard input is a function's name and arguments, and its
answer is a line of JSON; it ends when its standard input does, so with whoever started it.

What it is not: it keeps about 5 MB of a partition, has neither compaction nor a limit of metadata,
and hands aborted records out; `broker.py` has a real one.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import subprocess
import sys
from importlib.metadata import files

#: Kafka's numbers for kinds of requests.
PRODUCE, FETCH, LIST_OFFSETS, METADATA = 0, 1, 2, 3
OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT = 8, 9, 10, 11, 12
INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, END_TXN, TXN_OFFSET_COMMIT = 22, 24, 26, 28

_INT, _INT16, _INT32, _INT64 = ctypes.c_int, ctypes.c_int16, ctypes.c_int32, ctypes.c_int64
_STR = ctypes.c_char_p
#: What each function takes behind the cluster; each returns an error or nothing.
FUNCTIONS: dict[str, list[type]] = {
    "topic_create": [_STR, _INT, _INT],
    "topic_delete": [_STR],
    "topic_set_error": [_STR, _INT],
    "partition_set_leader": [_STR, _INT32, _INT32],
    "partition_delete_records": [_STR, _INT32, _INT64],
    "broker_set_down": [_INT32],
    "broker_set_up": [_INT32],
    "broker_set_rtt": [_INT32, _INT],
    "coordinator_set": [_STR, _STR, _INT32],
    "set_controller_id": [_INT32],
    "clear_request_errors": [_INT16],
    "group_initial_rebalance_delay_ms": [_INT32],
    "start_request_tracking": [],
    "clear_requests": [],
}
#: Those that return nothing.
_VOID = {
    "set_controller_id",
    "topic_set_error",
    "clear_request_errors",
    "group_initial_rebalance_delay_ms",
    "start_request_tracking",
    "clear_requests",
}


def library_path() -> str:
    """Where the library is that confluent-kafka is linked with."""
    found = [file for file in files("confluent-kafka") or () if "librdkafka" in file.name]
    assert found, "confluent-kafka is not of a wheel that brings librdkafka"
    return str(found[0].locate())


# In the helper process ----------------------------------------------------------------------


class Cluster:
    """The cluster, in this process."""

    def __init__(self) -> None:
        self._library = library = ctypes.CDLL(library_path())
        for name in ("conf_new", "new", "mock_cluster_new", "mock_get_requests"):
            getattr(library, f"rd_kafka_{name}").restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        library.rd_kafka_mock_request_timestamp.restype = _INT64
        library.rd_kafka_mock_request_api_key.restype = _INT16
        library.rd_kafka_mock_request_id.restype = _INT32

    def begin(self, brokers: int) -> str:
        """Make an empty cluster; return the addresses of its brokers."""
        library, why = self._library, ctypes.create_string_buffer(512)
        conf = ctypes.c_void_p(library.rd_kafka_conf_new())
        library.rd_kafka_conf_set(conf, b"log_level", b"0", None, ctypes.c_size_t(0))
        client = library.rd_kafka_new(0, conf, why, ctypes.c_size_t(len(why)))
        assert client, why.value.decode()
        self._client = ctypes.c_void_p(client)
        self._cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(self._client, brokers))
        return library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def end(self) -> None:
        """End the cluster."""
        self._library.rd_kafka_mock_cluster_destroy(self._cluster)
        self._library.rd_kafka_destroy(self._client)

    def push_errors(self, api: int, errors: list[int]) -> None:
        """The next requests of a kind are answered so."""
        array = (_INT * len(errors))(*errors)
        self._library.rd_kafka_mock_push_request_errors_array(
            self._cluster, _INT16(api), ctypes.c_size_t(len(errors)), array
        )

    def requests(self) -> list[tuple[int, int]]:
        """Return the requests by broker, in order, since tracking started."""
        n = ctypes.c_size_t()
        array = self._library.rd_kafka_mock_get_requests(self._cluster, ctypes.byref(n))
        entries = [
            ctypes.c_void_p(one)
            for one in ctypes.cast(array, ctypes.POINTER(ctypes.c_void_p))[: n.value]
        ]
        found = [
            (
                self._library.rd_kafka_mock_request_timestamp(one),
                self._library.rd_kafka_mock_request_id(one),
                self._library.rd_kafka_mock_request_api_key(one),
            )
            for one in entries
        ]
        self._library.rd_kafka_mock_request_destroy_array(
            ctypes.c_void_p(array), ctypes.c_size_t(n.value)
        )
        return [request[1:] for request in sorted(found)]

    def call(self, name: str, arguments: list) -> None:
        """Call one of `FUNCTIONS`."""
        function = getattr(self._library, f"rd_kafka_mock_{name}")
        function.restype = None if name in _VOID else _INT
        kinds = FUNCTIONS[name]
        encoded = (
            kind(value.encode() if kind is _STR else value)
            for kind, value in zip(kinds, arguments, strict=True)
        )
        error = function(self._cluster, *encoded)
        assert not error, f"librdkafka says {error}"


def serve() -> None:
    """Answer until nobody asks any more."""
    cluster = Cluster()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            own = getattr(cluster, name, None)
            said = own(*arguments) if own is not None else cluster.call(name, arguments)
            answer = {"said": said}
        except Exception as error:
            answer = {"failed": f"{name}{tuple(arguments)}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
    sys.exit()


# In the test --------------------------------------------------------------------------------

from servers import KafkaServer  # noqa: E402 - the helper process needs no clients


class MockKafka(KafkaServer):
    """A mock cluster; brokers are numbered from 1.

    Every function of `FUNCTIONS` is a method: ``mock.partition_set_leader(topic, 0, 2)``.  There is
    one at a time: all have the same helper process, whose start takes longer than most tests.
    """

    _process = None

    def __init__(self, brokers: int = 1) -> None:
        self._brokers = brokers
        if self._process is None or self._process.poll() is not None:
            MockKafka._process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            # The kill comes first.  Without it the process may never end: a process that was forked
            # meanwhile also holds the pipe, so its input would stay open.
            atexit.register(self._process.communicate)
            atexit.register(self._process.kill)
        self.bootstrap_servers = self.ask("begin", brokers)
        self.ask("set_controller_id", 1)  # whom admin clients ask for topics
        # Kafka's own three seconds are for members that start one by one.
        self.ask("group_initial_rebalance_delay_ms", 100)

    def ask(self, name: str, *arguments: object):
        """Have the helper process call a function, and return its answer."""
        self._process.stdin.write(json.dumps([name, arguments]) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the mock cluster's process has ended: {self._process.wait()}"
        answer = json.loads(line)
        assert "failed" not in answer, answer["failed"]
        return answer["said"]

    def __getattr__(self, name: str):
        if name not in FUNCTIONS:
            raise AttributeError(name)
        return lambda *arguments: self.ask(name, *arguments)

    def create_topic(self, topic: str, partitions: int = 1, **config: object) -> None:
        """Make a topic, on all brokers."""
        assert not config, "a mock cluster's topics have no settings"
        self.ask("topic_create", topic, partitions, min(self._brokers, 3))

    def delete_topic(self, topic: str) -> None:
        """Delete a topic."""
        self.ask("topic_delete", topic)

    def delete_records(self, topic: str, before: int, partition: int = 0) -> None:
        """Delete all records of a partition below an offset."""
        self.ask("partition_delete_records", topic, partition, before)

    def fail_requests(self, api: int, *errors: int) -> None:
        """Answer the next requests of a kind, at whichever broker, with these error codes.

        0 lets one through, -195 closes the connection instead of an answer.
        """
        self.ask("push_errors", api, errors)

    def requests(self) -> list[tuple[int, int]]:
        """Return which broker was asked for what since `start_request_tracking`, in order."""
        return [tuple(request) for request in self.ask("requests")]

    def close(self) -> None:
        """End the cluster."""
        self.ask("end")

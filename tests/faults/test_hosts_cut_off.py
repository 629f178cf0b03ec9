"""A Spark cluster of hosts of their own, which are cut off from each other, on a lossy network.

Each host has a network, a file system and a Python environment that no other host has: master, two
workers, two hosts for drivers, and the bucket, where files, checkpoint and sink are.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

import fault_job
import hosts
import obstore
import places
import pytest
from counts import numbers
from processes import eventually
from s3_server import FaultProxy, store_of

import ackcore

REASON = hosts.why_not()
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

HERE = Path(__file__).parent
FILE_ROWS = 40
DEPLOY = "org.apache.spark.deploy"
CUT_S = 60


class SparkCluster:
    """The hosts, and a job of so many files."""

    def __init__(self, directory, job, server, files, stack):
        self.files, self._directory, self._fed = files, directory, 0
        self.network = hosts.Network(seed=30)
        stack.callback(self.network.close)
        self.hosts, self._stack = {}, stack
        for name in ("bucket", "master", "worker-1", "worker-2", "driver-1", "driver-2"):
            self._add(name)
        with self["bucket"].inside():
            listens = socket.create_server((self["bucket"].address, 0))
        proxy = FaultProxy(server, listens)
        stack.callback(proxy.close)
        place = places.Bucket.before(proxy, directory / "job")
        place.more = {}
        self._store = store_of(server.endpoint, place.bucket)
        self.job = job(
            {},
            files=0,
            place=place,
            message_id="id",
            rules={
                "enrich": {"rate": 0.02, "reject_every": fault_job.POISON},
                "count": {"rate": 0.01},
            },
            settings={"max_attempts": 12},
            trigger={"processingTime": "100 milliseconds"},
            until_decided=files * FILE_ROWS,
            patience_s=1800,
        )
        self._start()

    def __getitem__(self, name):
        return self.hosts[name]

    def _add(self, name):
        root = self._directory / name
        root.mkdir()
        code = {"ackcore": Path(ackcore.__file__).parent}
        if name.startswith("driver"):
            code["faults"] = HERE
        host = hosts.Host(name, len(self.hosts) + 2, self.network, root, code)
        self._stack.callback(host.close)
        self.hosts[name] = host

    def _run(self, name, *command, **environment):
        return self[name].run(*command, **self.job.place.environment, **environment)

    def _start(self):
        """Start Spark's master and workers."""
        self.url = f"spark://{self['master'].address}:7077"
        master = ["master.Master", "--port", "7077"]
        worker = ["worker.Worker", "--cores", "2", "--memory", "2g", "--work-dir", "/tmp", self.url]
        for name in ("master", "worker-1", "worker-2"):
            what, *options = master if name == "master" else worker
            options += ["--host", self[name].address, "--webui-port", "0"]
            start = f"/opt/{name}/packages/pyspark/bin/spark-class"
            self._run(name, start, f"{DEPLOY}.{what}", *options, SPARK_DAEMON_MEMORY="256m")
            said = "elected leader" if name == "master" else "Successfully registered with master"
            eventually(lambda name=name, said=said: said in self[name].said)

    def feed(self, files):
        """Put files of more records into the bucket."""
        for number in range(self._fed, self._fed + files):
            lines = [*fault_job.lines((number + 1) * FILE_ROWS).values()][-FILE_ROWS:]
            self.job.records.update({line["id"]: line for line in lines})
            fault_job.stage(self.job.directory / "in", lines, 1)
            file = self.job.directory / "in/lines-000.parquet"
            obstore.put(self._store, f"some/place/in/{number:05}.parquet", file.read_bytes())
        self._fed += files

    def drive(self, name):
        """Start a driver on a host."""
        config = {
            **self.job.config,
            "directory": "/tmp",
            "bucket_files": self.job.place.checkpoint.replace("/checkpoint", "/in"),
            "master": self.url,
            "name": name,
            "result": "/result.json",
        }
        (self[name].root / "config.json").write_text(json.dumps(config))
        return self._run(name, "python", f"/opt/{name}/code/faults/cluster_job.py", "/config.json")

    def done(self):
        """Return how many micro-batches are done."""
        try:
            head = obstore.get(self._store, "some/place/checkpoint/ackcore/head.json").bytes()
        except FileNotFoundError:
            return 0
        recorded = json.loads(bytes(head).partition(b"\n")[0])["records"]
        return max(numbers(recorded, "done"), default=-1) + 1

    def more_done(self, micro_batches, driver):
        """Wait until so many more micro-batches are done; fail if the driver ends before."""
        goal = self.done() + micro_batches

        def reached():
            assert driver.poll() is None, "the driver ended"
            return self.done() >= goal

        eventually(reached)

    def ended(self, driver, name):
        """Wait for the end of a driver; return the error of its query."""
        eventually(lambda: driver.poll() is not None)
        assert driver.returncode == 0, self[name].said[-5000:]
        return json.loads((self[name].root / "result.json").read_text())["error"]

    def check(self):
        """Hold the counts to the model."""
        found = self.job.check(fault_job.poisoned)
        assert found.totals["records"] == len(self.job.records) == self.files * FILE_ROWS


@pytest.fixture
def cluster(tmp_path, job, s3_server):
    """``cluster(files)`` starts one, for a job of so many files; a packet in 200 is lost."""
    with contextlib.ExitStack() as stack:

        def cluster(files):
            it = SparkCluster(tmp_path, job, s3_server, files, stack)
            it.network.delay_s, it.network.loss = 0.002, 0.005
            return it

        yield cluster


def test_packets_are_lost_and_delayed(cluster):
    it = cluster(files=10)
    it.network.delay_s, it.network.loss = 0.01, 0.03
    it.feed(10)
    driver = it.drive("driver-1")
    assert it.ended(driver, "driver-1") is None
    assert it.network.lost > 100
    it.check()


def cut_off(it, driver, name, *others):
    """Cut a host off for a minute in the middle of the work, and have more come meanwhile.

    Return how many micro-batches were done meanwhile.
    """
    it.feed(8)
    it.more_done(3, driver)
    with it.network.cut(it[name], *(it[other] for other in others)):
        back, before = time.monotonic() + CUT_S, it.done()
        it.feed(8)
        eventually(lambda: time.monotonic() >= back)
        done = it.done() - before
    it.feed(8)
    return done


def test_a_worker_host_is_cut_off_for_a_minute(cluster):
    """The other worker does its work meanwhile."""
    it = cluster(files=24)
    driver = it.drive("driver-1")
    assert cut_off(it, driver, "worker-1") > 0
    assert it.ended(driver, "driver-1") is None
    it.check()


@pytest.mark.parametrize("name", ["worker-1", "driver-1"])
def test_one_host_does_not_reach_the_bucket_for_a_minute(cluster, name):
    it = cluster(files=24)
    driver = it.drive("driver-1")
    cut_off(it, driver, name, "bucket")
    assert it.ended(driver, "driver-1") is None
    it.check()


def test_another_driver_takes_over_from_a_host_that_is_cut_off(cluster):
    it = cluster(files=24)
    first = it.drive("driver-1")
    it.feed(12)
    it.more_done(3, first)
    with it.network.cut(it["driver-1"]):
        second = it.drive("driver-2")
        it.more_done(3, second)
    it.feed(8)
    assert "CheckpointInUse" in it.ended(first, "driver-1")
    it.feed(4)
    assert it.ended(second, "driver-2") is None
    it.check()

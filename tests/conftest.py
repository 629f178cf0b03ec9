"""Fixtures of several test modules: the backends, and hypothesis' effort."""

import doctest
import gc
import importlib
import os
import re
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings

from ackcore import Acker

# The modules beside the tests: tests are no package.
PLACES = ("", "kafka", "calls", "flow", "tables", "topology", "dispatch", "cli", "ui", "spark")
sys.path[:0] = [str(Path(__file__).parent / name) for name in (*PLACES, "faults")]

# The first two are deterministic: a run that fails on one machine fails on the next.
for name, examples in (("fast", 60), ("few", 20)):
    settings.register_profile(
        name, max_examples=examples, deadline=None, derandomize=True, database=None
    )
settings.register_profile(
    "thorough",
    max_examples=2_000,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile(os.environ.get("ACKCORE_HYPOTHESIS", "fast"))


# For all JVMs that tests start: they live for minutes, and a third of their time would go into the
# second compiler, which is for programs that live for hours; nor is there work for G1's threads.
# With one compiler the code cache has 48 MB by default.  A session of `make test` needs 97: the JVM
# would search a full cache for code to drop, and compile the same methods again.
os.environ["JAVA_TOOL_OPTIONS"] = " ".join(
    [
        os.environ.get("JAVA_TOOL_OPTIONS", ""),
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:ReservedCodeCacheSize=240m",
    ]
).strip()


#: Spark's classes for the JVMs that tests start: they then start in about half of the CPU time.
#: `make test` writes the file. A JVM ignores the file of another Java or Spark.
CLASSES = Path(sys.prefix, "spark-classes.jsa")
if CLASSES.exists():
    os.environ["SPARK_SUBMIT_OPTS"] = " ".join(
        [
            os.environ.get("SPARK_SUBMIT_OPTS", ""),
            f"-XX:SharedArchiveFile={CLASSES}",
            "-Xlog:cds=off",
            "-Xlog:cds+dynamic=off",
        ]
    ).strip()


# The `sitecustomize` there spares Spark's Python workers half of their CPU time.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parent / "spark_python"), os.environ.get("PYTHONPATH")])
)


def load_backend(name):
    """Return a backend's module, or skip; in CI a broken build must not pass."""
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if os.environ.get("ACKCORE_REQUIRE_NATIVE"):
            raise
        pytest.skip(f"not built: {error}")
    return module


@pytest.fixture(scope="session", params=["ackcore._native", "ackcore._reference"])
def backend(request):
    return load_backend(request.param)


@pytest.fixture(scope="session")
def Ledger(backend):
    return backend.Ledger


@pytest.fixture(scope="session")
def native():
    return load_backend("ackcore._native")


@pytest.fixture(scope="session")
def kafka_native():
    return load_backend("ackcore._kafka_native")


@pytest.fixture(scope="session", params=["ackcore._kafka_native", "ackcore._reference"])
def kafka_backend(request):
    return load_backend(request.param)


@pytest.fixture(scope="session")
def reference():
    return load_backend("ackcore._reference")


@pytest.fixture(params=[1, 3], ids=["1 shard", "3 shards"])
def make_acker(Ledger, request):
    """Make ackers of either backend, of one shard or several, in simulated time."""
    from ledger_scripts import Clock  # noqa: PLC0415 - on the path that is set above

    def make_acker(**arguments):
        return Acker(Ledger, **{"shards": request.param, "clock": Clock(), **arguments})

    return make_acker


#: Of test_cpu.py: processes that run beside all other tests are started first, and waited for last.
ORDER = {"test_each_level_can_be_ordered": -1, "test_level_keeps_the_contract": 1}


#: The files that take longest: those that began late would run alone in the end.
LONGEST = {
    f"tests/{name}.py"
    for name in (
        *("spark/test_planned_sources", "spark/test_kafka_spout", "spark/test_bucket_runs"),
        *("spark/test_query", "spark/test_letter_stores", "spark/test_letter_troubles"),
        *("spark/test_failed_files", "spark/test_jdbc_postgres", "spark/test_parquet_objects"),
        *("spark/test_interrupts", "spark/test_table_folds", "spark/test_buckets"),
        *("spark/test_object_journal", "spark/test_batch", "spark/test_windows"),
        *("kafka/test_consumer", "kafka/test_consumer_model", "faults/test_stopped_worlds"),
        *("faults/test_workers_die", "test_imports"),
    )
}


#: The files whose tests start a server, by the kind of the server.  One of xdist's workers gets
#: all files of a kind, so that the server is started once: that takes seconds of CPU, and a broker
#: needs 3 % of a core while it runs.
TOGETHER = {
    f"tests/{name}.py": server
    for server, names in {
        "hdfs": (
            *("spark/test_bucket_runs", "spark/test_stores", "spark/test_hdfs"),
            "spark/test_file_spout",
        ),
        "kafka": (
            *("spark/test_kafka_spout", "spark/test_kafka_sink", "spark/test_kafka_frames"),
            *("spark/test_kafka_groups", "spark/test_kafka_keyless", "spark/test_kafka_lines"),
            *("spark/test_kafka_too_large", "spark/test_readme", "kafka/test_consumer_groups"),
            *("kafka/test_cluster", "kafka/test_dead_letters", "kafka/test_letter_replay"),
            *("kafka/test_producing", "kafka/test_reading", "kafka/test_starts"),
            "kafka/test_truncations",
        ),
        "postgres": (
            *("spark/test_jdbc_postgres", "spark/test_postgres_sink"),
            *("spark/test_postgres_troubles", "spark/test_postgres_values"),
        ),
    }.items()
    for name in names
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``--dist loadfile``, the files of one kind in `TOGETHER` count as one file.

    One process takes files from the end of the list, where those without Spark are. It starts no
    session, which takes a minute of CPU until its code is compiled.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 - where xdist is

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

        def mark_test_complete(self, node, item_index, duration=0):
            if node is not self.nodes[0] or not self.workqueue:
                super().mark_test_complete(node, item_index, duration)
                return
            last = next(reversed(self.workqueue))
            self.workqueue.move_to_end(last, last=False)
            super().mark_test_complete(node, item_index, duration)
            if last in self.workqueue:
                self.workqueue.move_to_end(last)

    return Scheduling(config, log)


def pytest_configure(config):
    """Files go to xdist's workers in the order of the items."""
    # By itself it begins with those of the most tests, and ends with the longest ones.
    config.option.loadscopereorder = False


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Keep the garbage collector from what is loaded before the first test: 690,000 objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Whatever asks for a Spark or a real Kafka broker is marked so.

    Files that use the session of Spark come first, of these the ones in `LONGEST`.  Files without
    it come last, of these the ones in `LONGEST` at the end.
    """
    with_spark = set()
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "spark" in names or "connect" in names:
            item.add_marker("spark")
        if "kafka_broker" in names or "own_kafka_broker" in names:
            item.add_marker("broker")
        if "live_spark" in names:
            with_spark.add(item.nodeid.partition("::")[0])

    def place(item):
        file = item.nodeid.partition("::")[0]
        is_long = file in LONGEST
        rank = 1 - is_long if file in with_spark else 2 + is_long
        return ORDER.get(getattr(item, "originalname", ""), 0), rank

    items.sort(key=place)


class LiveSpark:
    """The Spark of all tests, and another one after its JVM has died: that fails one test.

    Attributes
    ----------
    log : Path
        What the JVM says; kept in pytest's own temporary directory, with what a crash leaves.
    """

    #: Two cores, and a task may fail three times before its job does.
    MASTER = "local[2,4]"
    CONF: ClassVar = {
        # The whole JVM ends: in some of Spark's threads the error would be lost.
        "spark.driver.extraJavaOptions": "-XX:+ExitOnOutOfMemoryError",
        "spark.sql.adaptive.enabled": "true",
        # Any, of the Spark Connect server that a test may ask for.
        "spark.connect.grpc.binding.port": "0",
    }

    def __init__(self, directory):
        self._directory = directory
        self._context = None
        self._session = None
        self._process = None
        self._connect = None

    @property
    def log(self):
        return self._directory / "jvm.log"

    @property
    def session(self):
        """The session, which lives."""
        if not self.is_alive() and not self._registers():
            self.close()
            self._start()
        return self._session

    def _registers(self):
        """Have the driver's blocks registered anew after shuffle files were lost; whether it lives.

        As the driver does when it starts, and a cluster's scheduler for an executor: that takes no
        JVM of its own, of 10 s of CPU, for each test that loses them.
        """
        if self._process is None or self._process.poll() is not None:
            return False
        context = self._session.sparkContext

        def field(of, name, owner):
            # Not by Py4J: there are classes of which it cannot list the methods.
            found = context._jvm.java.lang.Class.forName(of).getDeclaredField(name)
            found.setAccessible(True)
            return found.get(owner)

        with suppress(Exception):  # they are Spark's own, and a version may have others
            env = context._jsc.sc().env()
            blocks = field("org.apache.spark.SparkEnv", "blockManager", env)
            master, itself, endpoint = (
                field("org.apache.spark.storage.BlockManager", name, blocks)
                for name in ("master", "blockManagerId", "storageEndpoint")
            )
            directories = context._gateway.new_array(context._jvm.java.lang.String, 0)
            master.registerBlockManager(itself, directories, 1 << 29, 0, endpoint, False)
        return self.is_alive()

    def _start(self):
        # Here, since most tests must run where there is no Spark.
        from ackcore.examples.quiet_spark import spark_session  # noqa: PLC0415

        self._context = spark_session(self.MASTER, self.CONF, self.log)
        self._session, _ = self._context.__enter__()
        self._process = self._session.sparkContext._gateway.proc
        self._connect = None

    @property
    def connect(self):
        """A session of a Spark Connect server in the same JVM, started where first needed."""
        context = self.session.sparkContext
        if self._connect is None:
            name = "org.apache.spark.sql.connect.service.SparkConnectService"
            context._jvm.java.lang.Class.forName(name)  # a version without one says so
            service = context._jvm.java.lang.Class.forName(f"{name}$").getField("MODULE$").get(None)
            service.start(context._jsc.sc())
            self.connect_url = f"sc://127.0.0.1:{service.localPort()}"
            self._connect = connect_module().SparkSession.builder.remote(self.connect_url).create()
            assert type(self._connect).active() is self._connect  # of its results, some need it
        return self._connect

    def load_jars(self, *jars):
        """Return the session, whose JVM has the classes of these jars from now on."""
        jvm = self.session.sparkContext._jvm
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        for jar in jars:
            loader.addURL(jvm.java.io.File(str(jar)).toURI().toURL())
        return self._session

    def is_alive(self):
        """Whether the JVM answers, with a session that is as good as new.

        It is not after a shuffle file was lost: Spark then takes the blocks of the executor that
        had it for lost, here those of the driver itself, which only a cluster's scheduler lets
        register again.  From then on large results are lost, each heartbeat fails, and the 60th
        ends the JVM, with status 56: ten minutes later, in a test that has nothing to do with it.
        """
        if self._process is None or self._process.poll() is not None:
            return False
        context = self._session.sparkContext
        try:
            scala = None if context._jsc is None else context._jsc.sc()
            return (
                scala is not None
                and not scala.isStopped()
                and scala.getExecutorMemoryStatus().size() > 0
            )
        except Exception:
            return False

    def post_mortem(self):
        """How the JVM ended and what it said last; None if it lives, or was not started."""
        if self._process is None or self.is_alive():
            return None
        from jvm_exits import explain_exit  # noqa: PLC0415

        with suppress(subprocess.TimeoutExpired):
            # Its sockets close, and its context stops, before it has ended.
            self._process.wait(timeout=10)
        said = self.log.read_text(errors="replace").splitlines()[-50:]
        ended = explain_exit(self._process.poll())
        return "\n".join([f"pid {self._process.pid} ended: {ended}", f"{self.log}:", *said])

    def close(self):
        """Stop the session and its JVM, whichever of them lives."""
        if self._connect is not None:
            # Not closed alone: it would stay Spark's default one, in whose place no other comes.
            self._connect.release_session_on_close = False
            self._connect.stop()
        self._connect = None
        context, self._context = self._context, None
        if context is not None:
            context.__exit__(None, None, None)


def kafka_module(name):
    """One of tests/kafka, or a skip where there is no confluent-kafka; in CI there must be."""
    if os.environ.get("ACKCORE_REQUIRE_KAFKA"):
        return importlib.import_module(name)
    pytest.importorskip("confluent_kafka", reason="confluent-kafka is not installed")
    return importlib.import_module(name)


@pytest.fixture
def mock_kafka():
    """librdkafka's mock cluster: three brokers in a process of its own, empty, scripted."""
    mock = kafka_module("mock_broker").MockKafka(brokers=3)
    yield mock
    mock.close()


def _made(module, class_name, required, *arguments):
    """Make a server. Without it, skip the test, or fail if the variable ``required`` is set."""
    try:
        return getattr(module, class_name)(*arguments)
    except module.Unavailable as error:
        if os.environ.get(required):
            raise
        pytest.skip(str(error))


@contextmanager
def _real_kafka(directory):
    broker = _made(kafka_module("broker"), "Broker", "ACKCORE_REQUIRE_KAFKA", directory)
    try:
        yield broker.start()
    finally:
        broker.close()


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory):
    """A real Kafka broker, which all tests of a process share: take `new_topic`, `new_group`."""
    with _real_kafka(tmp_path_factory.mktemp("kafka") / "broker") as broker:
        yield broker
        broker.kill()  # at the end of a run nobody waits for an archive


@pytest.fixture(params=["mock", pytest.param("real", marks=pytest.mark.broker)])
def kafka(request):
    """Either Kafka, by one interface."""
    return request.getfixturevalue({"mock": "mock_kafka", "real": "kafka_broker"}[request.param])


@pytest.fixture
def own_kafka_broker(tmp_path):
    """One for this test alone, which may `kill` and `restart` it."""
    with _real_kafka(tmp_path / "kafka-broker") as broker:
        yield broker


@contextmanager
def _real_postgres():
    if not os.environ.get("ACKCORE_REQUIRE_POSTGRES"):
        pytest.importorskip("psycopg", reason="psycopg is not installed")
    module = importlib.import_module("postgres_server")
    server = _made(module, "PostgresServer", "ACKCORE_REQUIRE_POSTGRES")
    try:
        yield server.start()
    finally:
        server.remove()


@pytest.fixture(scope="session")
def postgres_server():
    """A real PostgreSQL, which all tests of a process share: take `new_database`."""
    with _real_postgres() as server:
        yield server


@pytest.fixture
def own_postgres_server():
    """One for this test alone, which may `kill` and `start` it."""
    with _real_postgres() as server:
        yield server


@pytest.fixture
def postgres(postgres_server):
    """How to connect to a database of a real PostgreSQL that is this test's own."""
    return postgres_server.new_database()


def _server_of(module_name, class_name, required="ACKCORE_REQUIRE_S3"):
    server = _made(importlib.import_module(module_name), class_name, required)
    yield server
    server.close()


@pytest.fixture(scope="session")
def s3_server():
    """A real S3 server, which all tests of a process share: take `s3`."""
    yield from _server_of("s3_server", "S3Server")


def _proxy_before(server, monkeypatch):
    """Yield a proxy that fails as it is told; the environment leads to it."""
    module = importlib.import_module("s3_server")
    proxy = module.FaultProxy(server)
    for name, value in module.environment(proxy.endpoint).items():
        monkeypatch.setenv(name, value)
    yield proxy
    proxy.close()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """A proxy before that server."""
    yield from _proxy_before(s3_server, monkeypatch)


@pytest.fixture(scope="session")
def s3_proxy():
    """A second S3 server, of other make."""
    yield from _server_of("s3_proxy", "S3Proxy")


@pytest.fixture
def second_s3(s3_proxy, monkeypatch):
    """A proxy before that one, which looks at a version and replaces it in two steps as well."""
    yield from _proxy_before(s3_proxy, monkeypatch)


@pytest.fixture
def second_bucket(s3_proxy, second_s3):
    """The URL of a place in a bucket of this test's own, on the second server."""
    return f"s3://{s3_proxy.new_bucket()}/some/place"


@pytest.fixture(scope="session")
def azurite():
    """A server of Azure's blob store."""
    yield from _server_of("azurite", "Azurite")


@pytest.fixture
def azure_container(azurite, monkeypatch):
    """The URL of a place in a container of this test's own, in Azure's blob store."""
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    return f"az://{azurite.new_container()}/some/place"


@pytest.fixture
def bucket(s3_server, s3):
    """The URL of a place in a bucket of this test's own."""
    return f"s3://{s3_server.new_bucket()}/some/place"


@pytest.fixture(scope="session")
def hdfs():
    """A real HDFS, which all tests of a process share."""
    yield from _server_of("mini_hdfs", "MiniHdfs", "ACKCORE_REQUIRE_HDFS")


@pytest.fixture
def own_hdfs():
    """A real HDFS that a test may kill."""
    yield from _server_of("mini_hdfs", "MiniHdfs", "ACKCORE_REQUIRE_HDFS")


@pytest.fixture
def hdfs_place(hdfs):
    """The URL of a place in HDFS that is this test's own."""
    return hdfs.new_place()


LIVE_SPARK = pytest.StashKey()


@pytest.fixture(scope="session")
def live_spark(request, tmp_path_factory):
    """The module that `spark` is taken from."""
    live = request.config.stash[LIVE_SPARK] = LiveSpark(tmp_path_factory.mktemp("spark"))
    yield live
    live.close()


@pytest.fixture
def needs_connect():
    """The module of Spark Connect's sessions, or a skip where its packages are not."""
    return connect_module()


def connect_module():
    """The same, by itself; in CI they must be there."""
    from ackcore.spark.base.versions import SPARK  # noqa: PLC0415

    if SPARK < (4, 0):
        pytest.skip("Spark Connect is supported from 4.0 on")
    if not os.environ.get("ACKCORE_REQUIRE_CONNECT"):
        for package in ("grpc", "grpc_status", "zstandard"):
            pytest.importorskip(package, reason=f"{package} is not installed: ackcore[connect]")
    return importlib.import_module("pyspark.sql.connect.session")


@contextmanager
def _connect_session(live):
    """A session of Spark Connect in the JVM that has the classic one, of which nothing is seen."""
    connect_module()
    session = live.connect
    with pytest.MonkeyPatch.context() as patch:
        # As `SparkSession.builder.remote` leaves it, in whose process there may be no classic one.
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        context = importlib.import_module("pyspark").SparkContext
        patch.setattr(context, "_active_spark_context", None)
        yield session


@pytest.fixture
def spark(live_spark, request):
    """One Spark for all tests, as long as its JVM lives; `on_both_sessions` also by its Connect."""
    if getattr(request, "param", "classic") == "classic":
        yield live_spark.session
        return
    with _connect_session(live_spark) as session:
        yield session


@pytest.fixture
def connect(live_spark):
    """A session of Spark Connect, to the Spark of all tests."""
    with _connect_session(live_spark) as session:
        yield session


@pytest.fixture
def other_connect(live_spark, connect):
    """One more, as of another client."""
    session = type(connect).builder.remote(live_spark.connect_url).create()
    yield session
    session.stop()


@pytest.fixture
def conf(spark, live_spark):
    """``conf(key, value)`` sets a setting of Spark SQL until the test is over."""
    before = {}

    def set_conf(key, value):
        before.setdefault(key, spark.conf.get(key, None))
        spark.conf.set(key, value)

    yield set_conf
    for key, value in before.items() if live_spark.is_alive() else ():
        if value is None:
            spark.conf.unset(key)
        else:
            spark.conf.set(key, value)


@pytest.fixture
def failing_at(monkeypatch):
    """``failing_at(name)`` has the driver fail where a failpoint would kill it.

    ``with failing_at(name):`` expects that it fails in the block, and ends this.
    """
    from ackcore.spark.base import failpoints  # noqa: PLC0415

    def failing_at(name=None):
        points = {} if name is None else failpoints.parse(f"{name}=raise")
        monkeypatch.setattr(failpoints, "_POINTS", points)
        return expected(*(name or "").partition(":"))

    @contextmanager
    def expected(step, _, number):
        with pytest.raises(Exception, match=f"failpoint {step} reached in micro-batch {number}"):
            yield
        failing_at()

    return failing_at


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Where a test fails and Spark's JVM is dead, the report says how it ended."""
    report = yield
    live = item.config.stash.get(LIVE_SPARK, None)
    if report.failed and live is not None:
        told = live.post_mortem()
        if told is not None:
            report.sections.append(("Spark's JVM", told))
    return report


@pytest.fixture
def run_readme():
    """``run_readme(on_spark, **names)`` runs the sessions of one kind, each by itself.

    Those of the README and, where they are, of ``docs/``; each has a ``folder`` of its own.
    What runs topologies in a test needs PySpark, too.
    """

    def run_readme(on_spark, on_kafka=False, **names):
        root = Path(__file__).parent.parent
        if on_kafka and not (root / "docs").is_dir():
            pytest.skip("the sessions with Kafka are in docs/")
        sessions = [
            (page.name, fence)
            for page in [root / "README.md", *sorted(root.glob("docs/*.md"))]
            for fence in re.findall(
                r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
            )
            if ">>>" in fence
            and bool(re.search(r"\bspark[.,]|ackcore\.testing", fence)) is on_spark
            and ("ackcore.kafka" in fence) is on_kafka
        ]
        assert sessions
        report = []
        for number, (page, session) in enumerate(sessions):
            given = dict(names)
            if "folder" in names:
                given["folder"] = names["folder"] / str(number)
                given["folder"].mkdir()
            test = doctest.DocTestParser().get_doctest(session, given, page, None, 0)
            doctest.DocTestRunner(verbose=False).run(test, out=report.append)
        assert not report, "".join(report)

    return run_readme

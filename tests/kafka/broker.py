"""A real Kafka broker: one process (KRaft), its jars from Maven, its ports and folder its own.

The jars are downloaded once, as `pom.xml` names them, into ``build/kafka-jars`` of the tree that
the tests lie in, or where ``ACKCORE_KAFKA_JARS`` says.  Where that cannot be, tests that ask for a
broker are skipped with the reason; with ``ACKCORE_REQUIRE_KAFKA=1`` they fail.
"""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import NewTopic
from servers import TIMEOUT_S, KafkaServer, raise_errors, wait_until

HERE = Path(__file__).parent
POM = HERE / "pom.xml"

# A JVM leaves a directory for its monitors in /tmp, whatever its setting for temporary files.
_JAVA = ["-XX:-UsePerfData", "-Xmx512m"]

#: Longer than one takes to start, among other JVMs that do.
_START_S = 90.0


class Unavailable(Exception):
    """No broker can run here."""


def java() -> str:
    """Return the Java to run with, or raise `Unavailable`."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if found is None or not Path(found).exists():
        raise Unavailable("a Kafka broker needs Java 17, there is none")
    return found


def jars() -> Path:
    """Return the directory of a broker's jars, or raise `Unavailable`."""
    default = HERE.parent.parent / "build" / "kafka-jars"
    return downloaded(POM, Path(os.environ.get("ACKCORE_KAFKA_JARS", default)), "a Kafka broker")


def downloaded(pom: Path, directory: Path, what: str, *options: str) -> Path:
    """Return where the jars are that a pom names, downloaded once, or raise `Unavailable`."""
    wanted = pom.read_text(encoding="utf-8")
    complete = directory / "pom.xml"  # the one they were downloaded for; written last
    directory.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{directory}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # xdist's processes come here at once
        if complete.exists() and complete.read_text(encoding="utf-8") == wanted:
            return directory
        maven = shutil.which("mvn")
        if maven is None:
            raise Unavailable(f"{what}'s jars come through Maven, there is no mvn")
        shutil.rmtree(directory, ignore_errors=True)
        goal = ["dependency:copy-dependencies", f"-DoutputDirectory={directory}", *options]
        command = [maven, "-B", "-q", "-f", str(pom), *goal]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode:
            said = (ended.stdout + ended.stderr).strip().splitlines()
            raise Unavailable(f"Maven could not download {what}'s jars: " + " / ".join(said[:3]))
        complete.write_text(wanted, encoding="utf-8")
    return directory


def format_once(command: list[str], data: Path, formatted: Path) -> None:
    """Have a JVM write the first files of a server once, and copy them for each later server."""
    if formatted.exists():
        shutil.copytree(formatted, data)
        return
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    copy = Path(f"{formatted}.{os.getpid()}")
    shutil.copytree(data, copy)
    try:
        copy.rename(formatted)
    except OSError:  # another process was first
        shutil.rmtree(copy)


def free_ports(n: int) -> list[int]:
    """Return ports that nobody listens at, below those that the system hands out by itself.

    A broker that was killed takes its own again: in between no client's connection may have it.
    """
    with ExitStack() as open_:
        sockets = [open_.enter_context(socket.socket()) for _ in range(n)]
        for sock in sockets:
            while True:
                with suppress(OSError):
                    sock.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_000)))
                    break
        return [sock.getsockname()[1] for sock in sockets]


class Broker(KafkaServer):
    """A broker whose log, settings and records are in one directory.

    Parameters
    ----------
    directory : Path
        Its own; made.
    """

    def __init__(self, directory: Path) -> None:
        self._java, self._jars = java(), jars()
        self._directory = directory
        self._process: subprocess.Popen | None = None
        self.log = directory / "broker.log"
        directory.mkdir(parents=True)

    # Starting and stopping

    def start(self) -> Broker:
        """Start it, on what is in its directory, and return it when it answers."""
        first = not (self._directory / "data").exists()
        for attempt in range(3):
            if first:
                self._format()
            self._launch()
            try:
                self._wait_until_ready()
                return self
            except AssertionError:
                taken = "Address already in use" in self.log.read_text(errors="replace")
                if not (first and taken) or attempt == 2:
                    raise
                shutil.rmtree(self._directory / "data")
                del self.admin  # it asks at the port that was taken
        raise AssertionError("not reached")

    def stop(self) -> None:
        """Let it end in order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """``kill -9``."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        """Kill it, or let it write the archive of a broker's classes if there is none yet."""
        if self._classes.exists():
            self.kill()
        else:
            self.stop()
            with suppress(FileNotFoundError):  # a JVM that writes none
                Path(f"{self._classes}.{os.getpid()}").rename(self._classes)

    def restart(self) -> Broker:
        """Start it again at the same ports, after `stop` or `kill`."""
        assert self._process is None, "it runs"
        return self.start()

    @property
    def pid(self) -> int:
        """The id of its running process."""
        assert self._process is not None, "it does not run"
        return self._process.pid

    def _format(self) -> None:
        port, controller, tokens = free_ports(3)
        self.bootstrap_servers = f"127.0.0.1:{port}"
        #: For clients that log in with a token: any JSON web token without a signature will do.
        self.token_servers = f"127.0.0.1:{tokens}"
        clients = f"PLAINTEXT://127.0.0.1:{port},SASL_PLAINTEXT://127.0.0.1:{tokens}"
        oauth = "org.apache.kafka.common.security.oauthbearer"
        properties = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"{clients},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": clients,
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,"
            "SASL_PLAINTEXT:SASL_PLAINTEXT",
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.sasl_plaintext.oauthbearer.sasl.jaas.config": (
                f"{oauth}.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub=broker;"
            ),
            "listener.name.sasl_plaintext.oauthbearer.sasl.server.callback.handler.class": (
                f"{oauth}.internals.unsecured.OAuthBearerUnsecuredValidatorCallbackHandler"
            ),
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "log.dirs": self._directory / "data",
            # What is for a cluster of several, in one.
            "offsets.topic.replication.factor": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "offsets.topic.num.partitions": 3,
            "transaction.state.log.num.partitions": 3,
            "share.coordinator.state.topic.num.partitions": 3,
            "num.network.threads": 2,
            "num.io.threads": 2,
            # Kafka's waits are for machines that are far apart.
            "group.initial.rebalance.delay.ms": 0,
            "broker.session.timeout.ms": 1000,
            "broker.heartbeat.interval.ms": 200,
            "log.cleaner.backoff.ms": 1000,
            "log.retention.check.interval.ms": 1000,
            "log.initial.task.delay.ms": 500,
            "group.min.session.timeout.ms": 1000,
            "group.consumer.min.session.timeout.ms": 1000,
            "group.consumer.min.heartbeat.interval.ms": 200,
            "group.consumer.heartbeat.interval.ms": 200,
            # However old a test says that its records are.
            "log.retention.ms": -1,
            "auto.create.topics.enable": "false",
        }
        settings = self._directory / "server.properties"
        settings.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
        (self._directory / "log4j.properties").write_text(
            "log4j.rootLogger=INFO, stderr\n"
            "log4j.appender.stderr=org.apache.log4j.ConsoleAppender\n"
            "log4j.appender.stderr.target=System.err\n"
            "log4j.appender.stderr.layout=org.apache.log4j.PatternLayout\n"
            "log4j.appender.stderr.layout.ConversionPattern=%d %p %m (%c)%n\n"
        )
        arguments = ["format", "-t", "AAAAAAAAAAAAAAAAAAAAAQ", "-c", str(settings)]
        command = [*self._command("kafka.tools.StorageTool"), *arguments]
        format_once(command, self._directory / "data", self._jars / "formatted")

    @property
    def _classes(self) -> Path:
        """An archive of a broker's classes, with which one starts in half of the CPU time."""
        return self._jars / "classes.jsa"

    def _command(self, program: str) -> list[str]:
        configuration = f"-Dlog4j.configuration=file:{self._directory / 'log4j.properties'}"
        return [self._java, *_JAVA, configuration, "-cp", f"{self._jars}/*", program]

    def _launch(self) -> None:
        # It ends with the process that started it, however that ends.
        setpriv = shutil.which("setpriv")
        with_us = [setpriv, "--pdeathsig", "KILL"] if setpriv else []
        archive = [f"-XX:ArchiveClassesAtExit={self._classes}.{os.getpid()}"]
        if self._classes.exists():  # a JVM ignores the file of another Java
            archive = [f"-XX:SharedArchiveFile={self._classes}", "-Xlog:cds=off"]
            archive += ["-Xlog:cds+dynamic=off"]
        java, *command = self._command("kafka.Kafka")
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [*with_us, java, *archive, *command, "server.properties"],
                cwd=self._directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            with suppress(KafkaException):
                if self.admin.list_topics(timeout=1).brokers:
                    return
            ended = self._process.poll()
            if ended is not None or time.monotonic() > deadline:
                self.kill()
                said = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
                raise AssertionError(f"the broker did not start, {ended}; its log ends:\n{said}")

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(how)
            process.wait(timeout=TIMEOUT_S)

    # What the tests ask for

    def create_topic(self, topic: str, partitions: int = 1, **config: object) -> None:
        """Make a topic: ``cleanup_policy="compact"`` is ``cleanup.policy``."""
        named = {key.replace("_", "."): str(value) for key, value in config.items()}
        new = NewTopic(topic, num_partitions=partitions, replication_factor=1, config=named)
        raise_errors(self.admin.create_topics([new]))
        # The controller knows it before the broker leads it.
        wait_until(lambda: self._leads(topic, partitions), f"{topic} has leaders")

    def _leads(self, topic: str, partitions: int) -> bool:
        found = self.admin.list_topics(topic, timeout=TIMEOUT_S).topics[topic].partitions
        return len(found) == partitions and all(one.leader == 1 for one in found.values())

    def delete_topic(self, topic: str) -> None:
        """Delete a topic, and return when it is gone."""
        raise_errors(self.admin.delete_topics([topic]))
        wait_until(
            lambda: topic not in self.admin.list_topics(timeout=TIMEOUT_S).topics,
            f"{topic} is gone",
        )

    def delete_records(self, topic: str, before: int, partition: int = 0) -> None:
        """Delete all records of a partition below an offset."""
        raise_errors(self.admin.delete_records([TopicPartition(topic, partition, before)]))

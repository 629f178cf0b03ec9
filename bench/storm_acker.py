"""Apache Storm's own acker (storm-client, brought by Maven) in a JVM beside us."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from bench.compiled import Unavailable
from bench.streams import Stream

HERE = Path(__file__).parent / "storm"
BUILD = HERE.parent.parent / "build" / "storm"


@functools.cache
def class_path() -> str:
    """Where the JVM finds Storm and our driver, fetched and compiled if need be."""
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            raise Unavailable(f"Storm's acker: no {tool}")
    jars, classes = BUILD / "jars", BUILD / "classes"
    path = f"{jars}/*:{classes}"
    driver = HERE / "AckerBench.java"
    commands = []
    if not list(jars.glob("storm-client-*.jar")):
        fetch = ["mvn", "-q", "-B", "-f", str(HERE / "pom.xml"), "dependency:copy-dependencies"]
        commands.append([*fetch, f"-DoutputDirectory={jars}"])
    compiled = classes / "AckerBench.class"
    if not compiled.exists() or compiled.stat().st_mtime < driver.stat().st_mtime:
        commands.append(["javac", "-nowarn", "-cp", path, "-d", str(classes), str(driver)])
    for command in commands:
        classes.mkdir(parents=True, exist_ok=True)
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            words = (made.stdout + made.stderr).strip().splitlines() or [""]
            raise Unavailable(f"Storm's acker: {command[0]} failed: {words[0]}")
    return path


class StormAcker:
    """A JVM that holds an aged acker, and applies rows of the stream when told to."""

    def __init__(self, stream: Stream, tuples: str) -> None:
        path = class_path()
        self.folder = tempfile.TemporaryDirectory(prefix="ackcore-storm-")
        for name in ("root_ids", "vals", "tasks"):
            column = getattr(stream, name)
            column.astype(column.dtype.newbyteorder("<")).tofile(Path(self.folder.name) / name)
        arguments = [self.folder.name, str(stream.aged), tuples]
        self.jvm = subprocess.Popen(
            # Room enough that collecting garbage is not what is measured.
            [
                "java",
                "-Xms1g",
                "-Xmx3g",
                "-XX:+UseParallelGC",
                "-cp",
                path,
                "AckerBench",
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.expect("ready")

    def answer(self) -> str:
        """The next line that the driver says."""
        assert self.jvm.stdout is not None
        line = self.jvm.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"Storm's driver ended with status {self.jvm.wait()}")
        return line

    def expect(self, word: str) -> None:
        """Wait until the driver says so; what Storm logs before that is none of ours."""
        while self.answer() != word:
            pass

    def run(self, rows: slice) -> float:
        """Apply rows; returns the seconds of CPU time that the JVM's thread took."""
        assert self.jvm.stdin is not None
        print(rows.start, rows.stop, file=self.jvm.stdin, flush=True)
        return int(self.answer()) / 1e9

    def acked(self) -> np.ndarray:
        """The roots that the last rows completed, in order."""
        return np.fromfile(Path(self.folder.name) / "acked", "<i8")

    def close(self) -> None:
        """End the JVM, and remove the columns."""
        assert self.jvm.stdin is not None
        assert self.jvm.stdout is not None
        self.jvm.stdin.close()
        self.jvm.wait()
        self.jvm.stdout.close()
        self.folder.cleanup()

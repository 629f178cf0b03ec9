"""Drivers that write a real table, each a process of its own, to be killed.

No tests; beside `killed_sinks`, which starts and kills them.
"""

from __future__ import annotations

import importlib
import json
import os
from contextlib import closing, nullcontext
from pathlib import Path

from killed_sinks import BATCHES
from worlds import LINES, Writing, fails

from ackcore.examples.quiet_spark import spark_session
from ackcore.spark.base import failpoints
from ackcore.spark.base.failpoints import failpoint
from ackcore.spark.sinks.delta import to_delta
from ackcore.spark.sinks.iceberg import to_iceberg
from ackcore.spark.sinks.jdbc import to_jdbc
from ackcore.spark.sinks.jdbc_connection import JdbcConnection, JdbcError, Server
from ackcore.spark.sinks.postgres import to_postgres

#: It refuses what begins with "BAD".
_TABLE = "CREATE TABLE lines ({} VARCHAR(20) CHECK ({} NOT LIKE 'BAD%'))"


class Delta:
    """A table at a path."""

    refuses = False

    def __init__(self, path):
        self.path = path / "table"
        self.sink = to_delta(self.path)

    def lines(self):
        lake = importlib.import_module("deltalake")
        if not lake.DeltaTable.is_deltatable(str(self.path)):
            return []
        return lake.DeltaTable(self.path).to_pyarrow_table()["line"].to_pylist()


class Iceberg:
    """A table of a catalog in SQLite."""

    refuses = False

    def __init__(self, path):
        uri, warehouse = f"sqlite:///{path}/catalog.db", f"file://{path}"
        about = {"name": "test", "type": "sql", "uri": uri, "warehouse": warehouse}
        self.catalog = importlib.import_module("pyiceberg.catalog").load_catalog(**about)
        self.catalog.create_namespace_if_not_exists("shop")
        self.catalog.create_table_if_not_exists("shop.lines", LINES)
        self.sink = to_iceberg("shop.lines", about)

    def lines(self):
        return self.catalog.load_table("shop.lines").scan().to_arrow()["line"].to_pylist()


class Postgres:
    """A table of a server that all drivers share."""

    refuses = True

    def __init__(self, path, dsn):
        self.dsn = dsn
        self._execute(_TABLE.replace("TABLE", "TABLE IF NOT EXISTS").format("line", "line"))
        self.sink = to_postgres(dsn, "lines")

    def _execute(self, statement):
        psycopg = importlib.import_module("psycopg")
        with closing(psycopg.connect(self.dsn, autocommit=True)) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def lines(self):
        return [line for (line,) in self._execute("SELECT line FROM lines")]


class Jdbc:
    """A table of a JDBC database, through a JVM that goes with the driver."""

    refuses = True

    def __init__(self, path, url, properties):
        self.server = Server(url, properties)
        with closing(JdbcConnection(self.server, "lines")) as connection:
            name = connection.quoted("line")
            try:
                connection.columns("lines")
            except JdbcError:
                connection.rollback()
                connection.execute(_TABLE.format(name, name))
                connection.commit()
        self.sink = to_jdbc(url, "lines", properties=properties)

    def lines(self):
        with closing(JdbcConnection(self.server, "lines")) as connection:
            name, found = connection.quoted("line"), []
            while True:  # a row at a time: they are few
                sql = f"SELECT MIN({name}) FROM lines WHERE {name} > ?"
                (line,) = connection.row(sql, found[-1] if found else "")
                if line is None:
                    return found
                same = connection.row(f"SELECT COUNT(*) FROM lines WHERE {name} = ?", line)
                found += [line] * int(same[0])


KINDS = {"delta": Delta, "iceberg": Iceberg, "postgres": Postgres, "jdbc": Jdbc}


class TableWorld(Writing):
    """A world whose sink is a table, and whose dead letters are files: they outlive the driver."""

    def __init__(self, path, table, spark=None):
        self.table, self.root = table, Path(path)
        super().__init__(self.root / "checkpoint", table.sink, {"max_sink_attempts": 3})
        self.spark = spark
        if not table.refuses:  # then records with such lines fail
            bad = [line for lines in BATCHES for line in lines if line.startswith("bad")]
            self.behaves = fails(*bad, final=True)

    def pause(self, seconds):
        return False

    def write_dead_letters(self, number, dead):
        lines = [line for table in dead.values() for line in table["line"].to_pylist()]
        file = self.root / f"dead-{number}.json"
        file.with_suffix(".tmp").write_text(json.dumps(lines))
        os.replace(file.with_suffix(".tmp"), file)
        failpoint("in-dead-letters", number)

    def tell(self):
        """Leave word of what is in the table, and of the counts, if they can be had."""
        state, engine = self.driver()
        with state:
            of = engine.counts
        counts = [of.records, of.acked, of.dead, of.waiting]
        said = {"lines": sorted(self.table.lines()), "counts": counts, "balanced": of.balanced}
        (self.root / "said.json").write_text(json.dumps(said))


def drive(path, kind, of, conf, points):
    """Be a driver that takes all micro-batches; points are as `failpoints` has them.

    What is there is told at the start, which is what the driver before left, and at the end.
    """
    os.setsid()  # the JVM is killed along
    session = spark_session("local[2]", conf) if conf is not None else nullcontext((None, None))
    with session as (spark, _):
        world = TableWorld(path, KINDS[kind](path, *of), spark)
        world.tell()
        failpoints._POINTS = failpoints.parse(points)
        state, _ = world.driver()
        with state:
            done = state.last_done
        first = 0 if done is None else done + 1
        for number, lines in enumerate(BATCHES[first:], first):
            world.process(number, lines)
        failpoints._POINTS = {}
        world.tell()

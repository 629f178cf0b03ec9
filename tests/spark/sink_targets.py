"""The targets of the contract of sinks: stores with a table of words."""

from __future__ import annotations

import copy
import importlib
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from accepted_rows import WORDS, accepted, release_all

from ackcore.examples.mongo_sink import MongoSink
from ackcore.spark import SinkUnavailable, to_delta, to_iceberg, to_jdbc, to_parquet, to_postgres
from ackcore.spark.sinks.jdbc_connection import JdbcConnection, Server
from ackcore.spark.sinks.sink import check_sink


class Target:
    """A store in which each test has an empty table of words, with a unique ``word`` for keys.

    `writer` makes a sink; `rows` and `hide` look into the table and move it away and back.
    """

    #: Whether rows may replace others by ``keys``.
    has_keys = True
    #: An n that the table refuses, row by row.
    too_large = None
    #: The class and message of the error of a driver whose commit meets that of another one.
    conflict = None
    #: The class of the error if the table is away.
    away = SinkUnavailable
    spark = None

    def sink(self, keys=None, name="count", schema=WORDS):
        self.make(keys)
        made = self.writer(keys=keys) if keys else self.writer()
        check_sink(name, made, schema)
        made.claim(name, "abc", "/cp")
        return made

    def make(self, keys):
        """Create the table, unless it is there."""

    def batch(self, files, number=0, **changes):
        return accepted(files, number, spark=self.spark, **changes)


class Delta(Target):
    """A Delta table."""

    conflict = ("CommitFailedError", "[Cc]oncurrent transaction")

    def __init__(self, request, path):
        self._lake = pytest.importorskip("deltalake")
        self.path = path / "table"

    def writer(self, **arguments):
        return to_delta(self.path, **arguments)

    def rows(self):
        if not self._lake.DeltaTable.is_deltatable(str(self.path)):
            return []
        found = self._lake.DeltaTable(self.path).to_pyarrow_table()
        return [tuple(row.values()) for row in found.to_pylist()]

    @contextmanager
    def hide(self):
        self.path.rename(self.path.with_name("gone"))
        yield
        self.path.with_name("gone").rename(self.path)

    def forget(self, number, accept):
        """Do what the error advises: reset the number, or accept what is written under it."""
        made = self._lake.Transaction
        name = "ackcore-abc-count"
        new = (
            [made(name, number), made(f"{name}-content", 0)] if accept else [made(name, number - 1)]
        )
        table = self._lake.DeltaTable(self.path)
        self._lake.write_deltalake(
            table,
            table.to_pyarrow_table().slice(0, 0),
            mode="append",
            commit_properties=self._lake.CommitProperties(app_transactions=new),
        )


class Iceberg(Target):
    """A table of a catalog in SQLite."""

    conflict = ("CommitFailedException", "was created concurrently")

    def __init__(self, request, path):
        pytest.importorskip("pyiceberg")
        pytest.importorskip("sqlalchemy")  # of the catalog
        uri = f"sqlite:///{path}/catalog.db"
        self.about = {"name": "test", "type": "sql", "uri": uri, "warehouse": f"file://{path}"}
        self._load = importlib.import_module("pyiceberg.catalog").load_catalog
        with self._catalog() as catalog:
            catalog.create_namespace_if_not_exists("shop")
            catalog.create_table_if_not_exists("shop.words", WORDS)

    @contextmanager
    def _catalog(self):
        with closing(self._load(**self.about)) as catalog:
            yield catalog

    def writer(self, **arguments):
        return to_iceberg("shop.words", self.about, **arguments)

    def rows(self):
        with self._catalog() as catalog:
            found = catalog.load_table("shop.words").scan().to_arrow()
        return [tuple(row.values()) for row in found.to_pylist()]

    @contextmanager
    def hide(self):
        with self._catalog() as catalog:
            catalog.rename_table("shop.words", "shop.gone")
            yield
            catalog.rename_table("shop.gone", "shop.words")

    def forget(self, number, accept):
        with self._catalog() as catalog, catalog.load_table("shop.words").transaction() as change:
            if accept:
                change.set_properties({"ackcore.abc.count": f"{number} any"})
            else:
                change.remove_properties("ackcore.abc.count")


class Postgres(Target):
    """A table of a real PostgreSQL."""

    too_large = 100
    # The new driver ends the connection of the old one.
    conflict = ("SinkUnavailable", "sink 'zähle', table words at .*terminating connection")

    def __init__(self, request, path):
        self._psycopg = pytest.importorskip("psycopg")
        self.dsn = request.getfixturevalue("postgres")
        self._made = []
        request.addfinalizer(lambda: [release_all(one) for one in self._made])

    def _execute(self, statement):
        with closing(self._psycopg.connect(self.dsn, autocommit=True)) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def make(self, keys):
        key = "PRIMARY KEY" if keys else ""
        self._execute(
            f"CREATE TABLE IF NOT EXISTS words (word text {key}, n bigint CHECK (n < 100))"
        )

    def writer(self, **arguments):
        # A driver that waits for another's lock fails.
        self._made.append(
            to_postgres(f"{self.dsn} options='-c lock_timeout=10s'", "words", **arguments)
        )
        return self._made[-1]

    def rows(self):
        return self._execute("SELECT word, n FROM words")

    @contextmanager
    def hide(self):
        self._execute("ALTER TABLE words RENAME TO gone")
        yield
        self._execute("ALTER TABLE gone RENAME TO words")

    def forget(self, number, accept):
        content = ", content = 'any'" if accept else ""
        number = number if accept else number - 1
        self._execute(f"UPDATE ackcore_batches SET batch_id = {number}{content}")


class Database:
    """A database of a test's own."""

    def __init__(self, session, url, **properties):
        self.session, self.url, self.properties = session, url, properties

    def execute(self, *statements):
        with closing(JdbcConnection(Server(self.url, self.properties), "words")) as connection:
            for statement in statements:
                connection.execute(statement)
            connection.commit()

    def rows(self, columns="word, n", table="words"):
        frame = self.session.read.jdbc(self.url, table, properties=self.properties)
        return sorted(tuple(row) for row in frame.selectExpr(*columns.split(", ")).collect())

    def tables(self):
        with closing(JdbcConnection(Server(self.url, self.properties), "words")) as connection:
            about = connection._connection.getMetaData()
            found, names = about.getTables(None, None, "%", None), []
            while found.next():
                if found.getString("TABLE_TYPE") == "TABLE":
                    names.append(found.getString("TABLE_NAME"))
        return names

    def has_staging(self):
        """Whether one was left behind; none is, but by who was cut off."""
        names = [name.lower() for name in self.tables()]
        return any(name.startswith("ackcore") and "batches" not in name for name in names)

    def sink(self, table="words", **arguments):
        arguments = {"properties": self.properties, **arguments}
        sink = to_jdbc(self.url, table, **arguments)
        sink.claim("count", "abc", "/cp")
        return sink

    def accepted(self, *of, **changes):
        return accepted(*of, spark=self.session, **changes)


DERBY = "jdbc:derby:memory:words"


def derby_database(spark):
    """Return a database without tables: one for all tests, as another takes a second to make."""
    Database(spark, f"{DERBY};create=true").execute()  # as long as this JVM lives
    database = Database(spark, DERBY, user="etl", password="hunter2")
    database.execute(*(f'DROP TABLE "{name}"' for name in database.tables()))
    return database


class Jdbc(Target):
    """A table of a `Database`."""

    too_large = 100

    def __init__(self, database):
        self.database, self.spark = database, database.session

    def make(self, keys):
        if "words" not in map(str.lower, self.database.tables()):
            key = "NOT NULL PRIMARY KEY" if keys else ""
            self.database.execute(
                f'CREATE TABLE words (word VARCHAR(9) {key}, "n" BIGINT CHECK ("n" < 100))'
            )

    def writer(self, **arguments):
        return to_jdbc(self.database.url, "words", properties=self.database.properties, **arguments)

    def rows(self):
        assert not self.database.has_staging()
        return self.database.rows()

    def forget(self, number, accept):
        content = ", content = 'any'" if accept else ""
        number = number if accept else number - 1
        self.database.execute(f"UPDATE ackcore_jdbc_batches SET batch_id = {number}{content}")


class Derby(Jdbc):
    """A table of Derby, which comes with Spark."""

    def __init__(self, request, path):
        super().__init__(derby_database(request.getfixturevalue("spark")))


class Mongo(Target):
    """The sink of the example, on a `FakeMongo`: no package registry has a mongod."""

    has_keys = False
    away = ConnectionError

    def __init__(self, request, path):
        self.server = FakeMongo()
        patch = pytest.MonkeyPatch()
        request.addfinalizer(patch.undo)
        made = SimpleNamespace(MongoClient=lambda uri: FakeClient(self.server))
        patch.setitem(importlib.import_module("sys").modules, "pymongo", made)

    def writer(self):
        return MongoSink("mongodb://etl:hunter2@db/?replicaSet=rs0", "shop", "words")

    def rows(self):
        documents = self.server.documents.get(("shop", "words"), [])
        return [(one["word"], one["n"]) for one in documents]

    @contextmanager
    def hide(self):
        self.server.is_up = False
        yield
        self.server.is_up = True

    def forget(self, number, accept):
        (mark,) = self.server.documents["shop", "ackcore_batches"]
        mark.update({"number": number, "content": "any"} if accept else {"number": number - 1})


class FakeMongo:
    """An in-memory server with the semantics of MongoDB's transactions that the example relies on.

    A transaction reads a snapshot, and its writes are seen after its commit alone.  A write of a
    document fails (WriteConflict) if another transaction has written it and is open, or has
    committed it since the snapshot.
    """

    def __init__(self):
        self.documents, self.versions, self.writers, self.is_up = {}, {}, {}, True


class FakeClient:
    """`pymongo.MongoClient`, as far as the example calls it."""

    def __init__(self, server):
        self.server = server

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def __getitem__(self, database):
        return {
            name: FakeCollection(self, (database, name)) for name in ("words", "ackcore_batches")
        }

    def start_session(self):
        return FakeSession(self)


class FakeSession:
    """`pymongo.client_session.ClientSession`: its end aborts an open transaction."""

    def __init__(self, client):
        self.client, self.snapshot, self.writes = client, None, []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._end()

    def _end(self):
        self.snapshot, self.writes = None, []
        writers = self.client.server.writers
        self.client.server.writers = {key: one for key, one in writers.items() if one is not self}

    def start_transaction(self):
        assert self.snapshot is None
        if not self.client.server.is_up:
            raise ConnectionError("no primary")  # AutoReconnect derives from it
        server = self.client.server
        self.snapshot = copy.deepcopy((server.documents, server.versions))

    def commit_transaction(self):
        server = self.client.server
        assert self.snapshot is not None
        for name, document in self.writes:
            kept = server.documents.setdefault(name, [])
            if "_id" in document:
                kept[:] = [one for one in kept if one.get("_id") != document["_id"]]
                server.versions[document["_id"]] = server.versions.get(document["_id"], 0) + 1
            kept.append(document)
        self._end()


class FakeCollection:
    """`pymongo.collection.Collection`, as far as the example calls it, within a session."""

    def __init__(self, client, name):
        self.client, self.name = client, name

    def find_one(self, key, session):
        assert session.snapshot is not None
        found = session.snapshot[0].get(self.name, [])
        return next((one for one in found if one["_id"] == key["_id"]), None)

    def insert_many(self, documents, session):
        assert session.snapshot is not None
        assert documents  # pymongo raises TypeError for an empty list
        session.writes += [(self.name, one) for one in documents]

    def replace_one(self, key, document, upsert, session):
        assert session.snapshot is not None
        assert upsert
        server, name = self.client.server, key["_id"]
        is_changed = server.versions.get(name) != session.snapshot[1].get(name)
        if is_changed or server.writers.setdefault(name, session) is not session:
            raise RuntimeError("WriteConflict")  # pymongo.errors.OperationFailure
        session.writes.append((self.name, {**key, **document}))


class Parquet(Target):
    """A Parquet directory, in which other rows replace those of the same number."""

    has_keys = False

    def __init__(self, request, path):
        self.path = path / "out"

    def writer(self):
        return to_parquet(self.path)

    def rows(self):
        parquet = importlib.import_module("pyarrow.parquet")
        files = sorted(self.path.glob("batch_id=*/*.parquet"))
        tables = [parquet.ParquetFile(file).read().to_pylist() for file in files]
        return [tuple(row.values()) for table in tables for row in table]


TRANSACTIONAL = {
    "delta": Delta,
    "iceberg": Iceberg,
    "postgres": Postgres,
    "derby": Derby,
    "mongo": Mongo,
}
ALL = {**TRANSACTIONAL, "parquet": Parquet}

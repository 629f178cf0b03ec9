"""A sink for MongoDB: each micro-batch is inserted once, in one transaction.

    builder.sink("check", MongoSink("mongodb://db/?replicaSet=rs0", "shop", "orders"))

Needs pymongo, and a replica set: a single mongod has no transactions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ackcore.spark import SinkBatch, TransactionalSink, Written


class MongoSink(TransactionalSink[Any]):
    """A sink that appends rows to a collection.

    The number of its last micro-batch is a document in ``ackcore_batches``.
    """

    def __init__(self, uri: str, database: str, collection: str) -> None:
        self._uri, self._database, self._collection = uri, database, collection

    def __repr__(self) -> str:
        return f"MongoSink({self._database!r}, {self._collection!r})"  # the URI may have a password

    @contextmanager
    def begin(self, batch: SinkBatch) -> Iterator[Any]:
        """Connect and begin a transaction; the end of its session aborts it if not committed."""
        import pymongo  # noqa: PLC0415

        with pymongo.MongoClient(self._uri) as client, client.start_session() as session:
            session.start_transaction()
            yield session

    def read_number(self, transaction: Any, batch: SinkBatch) -> Written | None:
        """Return the recorded number and its content; None at first.

        `record` fails if another transaction has changed it since.
        """
        found = self._batches(transaction).find_one(_key(batch), session=transaction)
        return None if found is None else Written(found["number"], found["content"])

    def write_rows(self, transaction: Any, batch: SinkBatch) -> None:
        """Insert each row as a document."""
        collection = transaction.client[self._database][self._collection]
        for rows in batch.record_batches():
            collection.insert_many(rows.to_pylist(), session=transaction)

    def record(self, transaction: Any, batch: SinkBatch, written: Written) -> None:
        """Record this micro-batch's number and content in place of the last one's."""
        new = {"number": written.number, "content": written.content}
        self._batches(transaction).replace_one(_key(batch), new, upsert=True, session=transaction)

    def commit(self, transaction: Any) -> None:
        """Commit the transaction."""
        transaction.commit_transaction()

    def _batches(self, transaction: Any) -> Any:
        return transaction.client[self._database]["ackcore_batches"]


def _key(batch: SinkBatch) -> dict[str, Any]:
    return {"_id": f"{batch.deployment}/{batch.sink}"}

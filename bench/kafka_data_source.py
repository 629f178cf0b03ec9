"""A data source in Python that yields a topic's records to Spark: needs Spark 4."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from ackcore.kafka.client_settings import ClientSettings
from ackcore.kafka.range_reader import RangeReader
from ackcore.kafka.ranges import OffsetRange

_END = "end"
#: As Spark wants it, without what it cannot say.
_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        (
            "headers",
            pa.list_(
                pa.field("element", pa.struct([("key", pa.string()), ("value", pa.binary())]))
            ),
        ),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
    ]
)


class KafkaRecords(DataSource):
    """Partitions of a topic, each from 0 to ``endN`` in Arrow batches."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "kafka-records"

    def schema(self) -> str:
        """Return the columns of a `KafkaSpout`."""
        return (
            "key binary, value binary, headers array<struct<key: string, value: binary>>, "
            "topic string, partition int, offset long, timestamp timestamp"
        )

    def reader(self, schema: Any) -> DataSourceReader:
        """Return what reads them."""
        return Reader(dict(self.options))


class Reader(DataSourceReader):
    """Reads a partition in each task, by the reader that `KafkaSpout` has."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> list[InputPartition]:
        """One for each of the topic's."""
        ends = [name.removeprefix(_END) for name in self._options if name.startswith(_END)]
        return [InputPartition(int(number)) for number in sorted(ends, key=int)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield its records."""
        number = partition.value
        range_ = OffsetRange(
            self._options["topic"], number, 0, int(self._options[f"{_END}{number}"])
        )
        with RangeReader(ClientSettings(self._options["servers"])) as reader:
            for batch in reader.read(range_):
                yield batch.cast(_SCHEMA)

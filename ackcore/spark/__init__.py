"""Acks on Spark: settle tables of ack events, and make ids in columns.

=====================  ===========================================================================
`settle`               what became of each root in a DataFrame of events
`settle_parquet`       the same for Parquet files, read by the workers themselves
`combine`              fold each partition's events, without a shuffle
`settle_partitions`    settle the partitions of an RDD
`functions`            root ids, edge ids and routing as Arrow UDFs
`shards`, `wire`       the parts of `settle`, for plans of your own
=====================  ===========================================================================

Needs ``ackcore[spark]``, or the pyspark and pyarrow of a cluster, and ackcore on its workers.
"""

from ackcore.spark import functions
from ackcore.spark.parquet import settle_parquet
from ackcore.spark.settle import combine, settle
from ackcore.spark.shards import settle_partitions

__all__ = ["combine", "functions", "settle", "settle_parquet", "settle_partitions"]

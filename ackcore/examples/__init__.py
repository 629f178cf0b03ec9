"""Complete jobs to run and to read.

====================  ===========================================================================
`word_count`          a topology that loses nothing while calls fail and drivers are killed
`storm_port`          a Storm topology, ported, with a table "Storm to ackcore"
`settle_table`        the ack log of another system, settled
`log_etl`             a producer and twelve unequal workers, without Spark; both kinds are killed
====================  ===========================================================================

Run each with ``python -m ackcore.examples.<name>``.
"""

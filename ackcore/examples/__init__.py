"""Complete jobs to run and to read.

====================  ===========================================================================
`word_count`          a topology that loses nothing while calls fail and drivers are killed
`storm_port`          a Storm topology, ported, with a table "Storm to ackcore"
`kafka_lines`         lines of a Kafka topic, some damaged; the driver is killed
====================  ===========================================================================

Run each with ``python -m ackcore.examples.<name>``.
"""

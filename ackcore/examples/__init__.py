"""Complete jobs to run and to read.

====================  ===========================================================================
`word_count`          a topology that loses nothing while calls fail and drivers are killed
`storm_port`          a Storm topology, ported: the reliable word count of storm-starter
`storm_windows`       rolling top words of storm-starter, ported: counts in windows that overlap
`click_sessions`      sessions of visitors, whose clicks arrive out of order
`kafka_lines`         lines of a Kafka topic, some damaged; the driver is killed
`mongo_sink`          a sink for MongoDB, to read
====================  ===========================================================================

Run each of the others with ``python -m ackcore.examples.<name>``.
"""

"""The lowest layer of `ackcore.spark`: files, locks, clocks, and Spark versions."""

"""The lowest layer of `ackcore.spark`: files, locks, clocks, and differences between Sparks."""

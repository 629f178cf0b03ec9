"""Read a checkpoint from outside, even while its query runs: without a lock, a write or a JVM."""

"""What all else in `ackcore.spark` stands on: files, clocks, and what is particular to Spark."""

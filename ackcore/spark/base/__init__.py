"""What the other packages build on: files, locks, clocks, and what is particular to Spark."""

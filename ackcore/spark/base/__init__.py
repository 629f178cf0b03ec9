"""What the other rooms build on: files, locks, clocks, and what is particular to Spark."""

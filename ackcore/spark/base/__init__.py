"""The base of the other packages: files, locks, clocks, and Spark's particulars."""

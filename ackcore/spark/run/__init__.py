"""One run of a micro-batch: one Spark action, and the check that its results agree."""

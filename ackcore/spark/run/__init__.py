"""One run of a micro-batch: one Spark action, and whether what came of it agrees."""

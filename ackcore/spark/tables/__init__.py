"""Tables of a checkpoint: the fold of a micro-batch's rows, and snapshots for readers."""

"""The records of a checkpoint, and the identity of its topology."""

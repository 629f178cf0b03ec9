"""Settling tables of ack events: folded, shipped in blobs, decided by shard."""

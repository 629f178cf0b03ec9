"""Settling tables of ack events: events are folded, shuffled as blobs, and settled by shard."""

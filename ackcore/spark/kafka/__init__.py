"""Spouts that read Kafka: the offsets of a micro-batch, their reader, and their commits."""

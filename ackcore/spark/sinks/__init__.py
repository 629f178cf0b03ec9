"""Sinks: they write the accepted rows of a micro-batch."""

"""Whole jobs to run and to read: ``python -m ackcore.examples.word_count`` is the first."""

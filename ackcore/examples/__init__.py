"""Complete jobs to read, and to run with ``python -m ackcore.examples.<name>``."""

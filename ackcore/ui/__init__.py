"""A page that shows the status of queries, from their checkpoints; requires ``ackcore[ui]``."""

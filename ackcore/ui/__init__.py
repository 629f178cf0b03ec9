"""A page that shows how queries stand, read from their checkpoints; needs ``ackcore[ui]``."""

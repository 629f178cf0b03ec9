"""Records that were given up: their store, reading them, and sending them again."""

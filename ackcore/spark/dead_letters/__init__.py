"""The store of dead letters, and the functions that read, replay and drop them."""

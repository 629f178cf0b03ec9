"""What is on record of a topology, and whose it is."""

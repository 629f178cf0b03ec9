"""What is on record of a topology, and which topology that is."""

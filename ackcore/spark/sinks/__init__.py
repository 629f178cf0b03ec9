"""What takes accepted rows out of a micro-batch."""

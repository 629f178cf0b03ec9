"""The parts of `ackcore.kafka.Consumer`, and the replay of its dead letters."""

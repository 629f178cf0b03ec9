"""Looking at a checkpoint from outside, also while its query runs: no lock, no write, no JVM."""

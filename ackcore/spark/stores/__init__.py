"""Where a checkpoint's records and files may lie: a file system, or a bucket."""

"""The stores of a checkpoint's records and files: a file system, or a bucket."""

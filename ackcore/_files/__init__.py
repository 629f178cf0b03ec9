"""What files on disk take to be one process's, and to be there after a crash."""

"""Files on disk that belong to one process and survive a crash."""

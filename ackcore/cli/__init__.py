"""The command line ``ackcore``; requires ``ackcore[cli]``.

`entry` loads only the module of the requested command. Exit codes are in `reporting`.
"""

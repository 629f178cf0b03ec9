"""The command line ``ackcore``; requires ``ackcore[cli]``.

Each command is a module. `entry` loads the requested one and no other. Exit codes are in
`reporting`.
"""

"""``ackcore`` on the command line; needs ``ackcore[cli]``.

Each command is a module; `entry` loads the one that is asked for, and no other.  Exit codes are in
`reporting`.
"""

"""Code in threads that start together, and in an interpreter of its own."""

import os
import subprocess
import sys
import threading


def run_threads(*works):
    """Run each function in its own thread, all started at once; raise the first error."""
    start = threading.Barrier(len(works))
    errors = []

    def run(work):
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def run_python(code, *arguments, options=(), timeout_s=600, **environment):
    """Return the output of a fresh interpreter; fail with its errors if it does not end well.

    None takes a variable out of the environment.
    """
    told = {name: text for name, text in os.environ.items() if name not in environment}
    told |= {name: text for name, text in environment.items() if text is not None}
    command = [sys.executable, *options, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr
    return done.stdout

"""The entry point of the command line: loads what a command needs, or names what is missing."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder

#: Commands by name, and the extra that each needs beside ``cli``.
COMMANDS = {
    "run": "spark",
    "status": "spark",
    "dead": "spark",
    "table": "spark",
    "skip": "spark",
    "explain": "spark",
    "doctor": None,
    "ui": "spark,ui",
}

#: Commands that only read or write checkpoints, which never contain pandas objects.
_ARROW_ONLY = ("status", "dead", "table", "skip", "ui")


class _NoPandas(MetaPathFinder):
    """An import hook that hides pandas.

    pyarrow checks whether a value is a pandas object, and would load pandas for that, which takes
    half a second.
    """

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Refuse pandas, and leave all other modules to other finders."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is not used here", name=fullname)


def _loads(name: str) -> bool:
    """Return whether a command has its requirements; print the missing ones."""
    try:
        import_module(f"ackcore.cli.{name}_command")
    except ModuleNotFoundError as error:
        if (error.name or "ackcore").partition(".")[0] == "ackcore":
            raise
        if error.name not in ("typer", "rich"):  # without them, no command works
            way_out = f"pip install 'ackcore[cli,{COMMANDS[name]}]'"
            print(f"ackcore: {name} needs {error.name}; {way_out}", file=sys.stderr)
        return False
    return True


def main() -> None:
    """Run the requested command."""
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    names = [asked] if asked in COMMANDS else list(filter(_loads, COMMANDS))
    if asked in _ARROW_ONLY:
        sys.meta_path.insert(0, _NoPandas())
    extra = "cli"
    try:
        app = import_module("ackcore.cli.reporting")
        extra = ",".join(["cli", *filter(None, [COMMANDS[names[0]]])]) if names else extra
        command = app.app_of(names)
    except ModuleNotFoundError as error:
        if (error.name or "ackcore").partition(".")[0] == "ackcore":
            raise
        way_out = f"pip install 'ackcore[{extra}]'"
        print(f"ackcore: {error.name} is not installed; {way_out}", file=sys.stderr)
        sys.exit(2)
    try:
        command()
    finally:
        _flush()


def _flush() -> None:
    """Write what is buffered, since an error at the exit of the interpreter cannot be caught."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

"""The entry point of the command line: loads what a command needs, or names what is missing."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder

#: The modules of commands, and the extra that each needs beside ``cli``.
MODULES = {
    "run_command": "spark",
    "checkpoint_commands": "spark",
    "dead_command": "spark",
    "explain_command": "spark",
    "doctor_command": None,
    "ui_command": "spark,ui",
}
#: The commands, and their modules.
COMMANDS = {
    "run": "run_command",
    "status": "checkpoint_commands",
    "dead": "dead_command",
    "table": "checkpoint_commands",
    "skip": "checkpoint_commands",
    "explain": "explain_command",
    "doctor": "doctor_command",
    "ui": "ui_command",
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


def _loads(module: str) -> bool:
    """Return whether the requirements of a module's commands are installed; print missing ones."""
    try:
        import_module(f"ackcore.cli.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "ackcore").partition(".")[0] == "ackcore":
            raise
        if error.name not in ("typer", "rich"):  # without them, no command works
            names = "/".join(name for name, own in COMMANDS.items() if own == module)
            way_out = f"pip install 'ackcore[cli,{MODULES[module]}]'"
            print(f"ackcore: {names} needs {error.name}; {way_out}", file=sys.stderr)
        return False
    return True


def main() -> None:
    """Run the requested command."""
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    modules = [COMMANDS[asked]] if asked in COMMANDS else list(filter(_loads, MODULES))
    if asked in _ARROW_ONLY:
        sys.meta_path.insert(0, _NoPandas())
    extra = "cli"
    try:
        app = import_module("ackcore.cli.reporting")
        extra = ",".join(["cli", *filter(None, [MODULES[modules[0]]])]) if modules else extra
        command = app.app_of(modules)
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
    """Write the buffered output now: an error at the interpreter's exit cannot be caught."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

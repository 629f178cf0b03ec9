"""The entry point of the command line: loads what a command needs, or names what is missing."""

from __future__ import annotations

import codecs
import json
import os
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from io import TextIOWrapper

#: Modules, each with the extras that it needs, and its commands.
MODULES = {
    "run_command": ("cli,spark", "run"),
    "checkpoint_commands": ("cli,spark", "status", "table", "skip"),
    "dead_command": ("cli,spark", "dead"),
    "explain_command": ("cli,spark", "explain"),
    "doctor_command": ("cli", "doctor"),
    "ui_command": ("cli,spark,ui", "ui"),
}

#: Commands that only read or write checkpoints, which never contain pandas objects.
_ARROW_ONLY = ("status", "dead", "table", "skip", "ui")


class _NoPandas(MetaPathFinder):
    """An import hook that hides pandas, which pyarrow would load to check values: half a second."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        """Raise ModuleNotFoundError for pandas, and leave other modules to other finders."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pandas is hidden, to start faster", name=fullname)


def _loads(module: str) -> bool:
    """Import a module of commands; if a package is missing, print its name and return False."""
    try:
        import_module(f"ackcore.cli.{module}")
    except ModuleNotFoundError as error:
        if (error.name or "ackcore").partition(".")[0] == "ackcore":
            raise
        if error.name not in ("typer", "rich"):  # without them, no command works
            extras, *commands = MODULES[module]
            way_out = f"pip install 'ackcore[{extras}]'"
            print(f"ackcore: {'/'.join(commands)} needs {error.name}; {way_out}", file=sys.stderr)
        return False
    return True


def _escaped(error: UnicodeError) -> tuple[str, int]:
    """Return JSON escapes of characters that the encoding lacks, and the index after these.

    It is a handler for `codecs.register_error`.
    """
    assert isinstance(error, UnicodeEncodeError)
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def main() -> None:
    """Run the command that the arguments of this process name; exit with its code."""
    if isinstance(sys.stdout, TextIOWrapper):
        codecs.register_error("ackcore", _escaped)
        sys.stdout.reconfigure(errors="ackcore")
    asked = next((word for word in sys.argv[1:] if not word.startswith("-")), None)
    modules = [name for name, (_, *commands) in MODULES.items() if asked in commands]
    if not modules:
        modules = list(filter(_loads, MODULES))
    if asked in _ARROW_ONLY:
        sys.meta_path.insert(0, _NoPandas())
    extras = "cli"
    try:
        app = import_module("ackcore.cli.reporting")
        extras = MODULES[modules[0]][0] if modules else extras
        command = app.app_of(modules)
    except ModuleNotFoundError as error:
        if (error.name or "ackcore").partition(".")[0] == "ackcore":
            raise
        way_out = f"pip install 'ackcore[{extras}]'"
        print(f"ackcore: {error.name} is not installed; {way_out}", file=sys.stderr)
        sys.exit(2)
    try:
        command()
    finally:
        _flush()


def _flush() -> None:
    """Write the buffered output now, unless its reader has ended: later no error can be caught."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

"""The screens that a command shows on a terminal."""

from __future__ import annotations

from io import StringIO

from rich.console import Console


def recorded(monkeypatch, module) -> Console:
    """Have a command's module print to a terminal whose text is kept: ``file.getvalue()``."""
    screen = Console(
        file=StringIO(), force_terminal=True, width=200, height=60, legacy_windows=False
    )
    monkeypatch.setattr(module, "console", lambda: screen)
    return screen

"""A check that tasks' objects can be pickled. Its error names the part that cannot."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType, MethodType

from pyspark import cloudpickle

from ackcore.spark.base.errors import one_line


def _refusal(value: object) -> Exception | None:
    """Return the error of pickling a value, or None if it can be pickled."""
    try:
        cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    except Exception as error:
        return error
    return None


def refuse_unpicklable(subject: str, value: object, where: str) -> None:
    """Refuse an object that cannot be sent to the workers; the message names the part at fault.

    Parameters
    ----------
    subject : str
        The object's name in messages.
    value : object
        A function, or an object whose methods are called.
    where : str
        The place at which to create the unpicklable part instead.

    Raises
    ------
    TypeError
        If pickling it raises.
    """
    error = _refusal(value)
    if error is None:
        return
    found = f"{type(error).__name__}: {one_line(error)}"
    while isinstance(value, functools.partial):
        for part in (*value.args, *value.keywords.values()):
            if _refusal(part) is not None:
                raise TypeError(
                    f"{subject} is sent to the workers, and an argument that it sets, a "
                    f"{type(part).__name__}, cannot be pickled ({found}); make it in {where}"
                ) from error
        value = value.func
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, FunctionType):
        refers, parts = "it refers to", _of_function(f"{value.__name__}()", value, set())
    else:
        for attribute, held in getattr(value, "__dict__", {}).items():
            if _refusal(held) is not None:
                raise TypeError(
                    f"{subject} is sent to the workers, and its attribute {attribute!r}, a "
                    f"{type(held).__name__}, cannot be pickled ({found}); make it in {where}"
                ) from error
        refers, parts = "its methods refer to", _of_class(type(value), set())
    for what, part in parts:
        raise TypeError(
            f"{subject} is sent to the workers with all that {refers}, and {what}, "
            f"a {type(part).__name__}, cannot be pickled ({found}); make it in {where}, or in a "
            "module that the workers import"
        ) from error
    raise TypeError(
        f"{subject} is sent to the workers and cannot be pickled ({found}); make what "
        f"cannot travel in {where}"
    ) from error


def _of_class(kind: type, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Yield the unpicklable parts of a class: attributes, and values that its methods refer to."""
    for base in kind.__mro__:
        # A class of a module that workers import is pickled by name.
        if _refusal(base) is None:
            continue
        for attribute, value in vars(base).items():
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, FunctionType):
                yield from _of_function(f"{base.__name__}.{attribute}()", function, seen)
            elif not attribute.startswith("__") and _refusal(value) is not None:
                yield f"the attribute {attribute!r} of class {base.__name__}", value


def _of_function(
    whose: str, function: FunctionType, seen: set[int]
) -> Iterator[tuple[str, object]]:
    if id(function) in seen:
        return
    seen.add(id(function))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    around = {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    names = _names_in(function.__code__)
    found = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for kind, values in (("the global", found), ("the variable", around)):
        for name, value in values.items():
            if _refusal(value) is None:
                continue
            inner: list[tuple[str, object]] = []
            if isinstance(value, FunctionType):
                inner = list(_of_function(f"{name}()", value, seen))
            elif isinstance(value, type) and id(value) not in seen:
                seen.add(id(value))
                inner = list(_of_class(value, seen))
            yield from inner or [(f"{kind} {name!r} in {whose}", value)]


def _is_filled(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


def _names_in(code: CodeType) -> list[str]:
    """Return the names that code looks up, including those of nested functions."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return [*code.co_names, *(name for one in inner for name in _names_in(one))]

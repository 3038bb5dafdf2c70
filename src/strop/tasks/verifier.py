"""The hidden side of a task: plain data that says what the repaired function must return. The agent never sees it.

Grading sends arguments into a box, gets observations back and compares them here, outside; ``observe`` is what runs inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from strop.core.errors import TaskError
from strop.tasks.values import JSON, UnencodableError, canonical, decode_value, encode_value

DRAIN_LIMIT = 64
"""An iterator result is compared by its first 64 items."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call with its expected result.

    Example: ``Case(args=("a b", 2), expected=["a", "b"])`` or ``Case(args=({"tuple": []},), raises="ValueError")``.

    Attributes:
        args: Encoded positional arguments.
        kwargs: Encoded keyword arguments.
        expected: Encoded result; meaningless when ``raises`` is given.
        raises: Name of the exception class, or ``None`` for a result.
    """

    args: tuple[JSON, ...]
    kwargs: Mapping[str, JSON] = field(default_factory=dict)
    expected: JSON = None
    raises: str | None = None

    def to_json(self) -> dict[str, JSON]:
        """Return plain JSON data."""
        data: dict[str, JSON] = {"args": list(self.args)}
        if self.kwargs:
            data["kwargs"] = dict(self.kwargs)
        if self.raises is None:
            data["expected"] = self.expected
        else:
            data["raises"] = self.raises
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, JSON]) -> Case:
        """Inverse of ``to_json``."""
        return cls(args=tuple(data["args"]), kwargs=data.get("kwargs", {}), expected=data.get("expected"), raises=data.get("raises"))

    def is_met(self, result: JSON, raised: str | None) -> bool:
        """Whether an observation is the expected one (types count, see ``strop.tasks.values``)."""
        if self.raises is not None or raised is not None:
            return self.raises == raised
        return canonical(result) == canonical(self.expected)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verifier:
    """What must hold of one function.

    Example::

        Verifier(module="boltons.strutils", qualname="cardinalize", path="boltons/strutils.py",
                 visible=(Case(args=("bus", 2), expected="buses"), ...), hidden=(...))

    Attributes:
        module: Dotted name that is imported with the workspace root first on ``sys.path``.
        qualname: Function within the module.
        path: Workspace-relative file of the function, the one that was mutated.
        visible: The 8 cases that the workspace's own test file holds.
        hidden: At least 16 other cases.
        drain: The result is an iterator and the first 64 items are compared as a list.
    """

    module: str
    qualname: str
    path: str
    visible: tuple[Case, ...]
    hidden: tuple[Case, ...]
    drain: bool = False

    def to_json(self) -> dict[str, JSON]:
        """Return plain JSON data."""
        return {
            "module": self.module,
            "qualname": self.qualname,
            "path": self.path,
            "drain": self.drain,
            "visible": [case.to_json() for case in self.visible],
            "hidden": [case.to_json() for case in self.hidden],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, JSON]) -> Verifier:
        """Inverse of ``to_json``.

        Raises:
            TaskError: A key is missing.
        """
        try:
            return cls(
                module=data["module"],
                qualname=data["qualname"],
                path=data["path"],
                drain=bool(data["drain"]),
                visible=tuple(map(Case.from_json, data["visible"])),
                hidden=tuple(map(Case.from_json, data["hidden"])),
            )
        except KeyError as error:
            raise TaskError(f"verifier data lacks the key {error}") from None


def observe(function: Callable[..., Any], args: tuple[JSON, ...], kwargs: Mapping[str, JSON], *, drain: bool) -> tuple[JSON, str | None]:
    """Call ``function`` with fresh decoded arguments.

    Returns:
        ``(encoded result, None)``, or ``(None, name of the exception class)``. A result that isn't plain data counts as the
        exception ``"UnencodableError"``.
    """
    values = [decode_value(item) for item in args]
    named = {name: decode_value(item) for name, item in kwargs.items()}
    try:
        result = function(*values, **named)
        if drain:
            result = list(itertools.islice(result, DRAIN_LIMIT))
        return encode_value(result), None
    except UnencodableError:
        return None, "UnencodableError"
    except Exception as error:
        # The code under test may raise anything; its name is the observation.
        return None, type(error).__name__

"""Options that go together as one parameter of a command, and help that shows them together. Knows no option."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from typer.core import TyperCommand


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: each parameter whose type is a dataclass becomes that class's fields, as options.

    The command itself still gets one value of the class. Names are unique over all of them.
    """
    groups, hints = _groups_of(command)
    own = [p for p in inspect.signature(command).parameters.values() if p.name not in groups]
    parameters = [p.replace(annotation=hints[p.name]) for p in own]
    for kind in groups.values():
        parameters += _fields_of(kind)

    def run(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def examples(*commands: str) -> str:
    """The end of a command's help: each example a line of its own, as it can be copied."""
    title = "Example:" if len(commands) == 1 else "Examples:"
    return "\n".join(("\b", title, *(f"  {command}" for command in commands)))  # \b: click leaves the lines as they are


GENERAL = "Options"


class Grouped(TyperCommand):
    """Help with a section for each `rich_help_panel`, in the order they come. typer itself has them with rich only."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """ctx, formatter: click's, of which typer has a copy of its own."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_section_of(param), []).append(record)
        general = sections.pop(GENERAL, [])
        for title, records in (*sections.items(), (GENERAL, general)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def _section_of(param: Any) -> str:
    default = "Arguments" if param.param_type_name == "argument" else GENERAL
    return getattr(param, "rich_help_panel", None) or default


def _groups_of(command: Callable[..., None]) -> tuple[dict[str, type[Any]], dict[str, Any]]:
    hints = get_type_hints(command, include_extras=True)
    return {
        name: kind for name, kind in hints.items() if inspect.isclass(kind) and dataclasses.is_dataclass(kind)
    }, hints


def _fields_of(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(kind)
    ]

"""Command-line options: each command takes its options from its settings, in sections."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from swarm.settings import Flag, headings, sections

KINDS = {int: "<int>", float: "<number>", Path: "<path>"}
"""Placeholders for values in the help; all other types are text"""

OTHER = "Options"  # Heading of options in no section

REWARDS_HELP = "NAME=WEIGHT, as lead takes them."
Rewards = Annotated[list[str] | None, typer.Option("--reward", "--rewards", help=REWARDS_HELP)]
Json = Annotated[bool, typer.Option("--json", help="The last line of stdout is one JSON object.")]


class Sections(TyperCommand):
    """A command whose help lists its options in sections."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        found: dict[str, list[tuple[str, str]]] = {OTHER: []}
        for option in self.get_params(ctx):
            if (record := option.get_help_record(ctx)) is not None:
                found.setdefault(getattr(option, "rich_help_panel", None) or OTHER, []).append(record)
        for name, records in found.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)


def with_settings(kind: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of `kind` that has a flag. The given values arrive by name in its first
    argument. `kind` checks them, so that flags and files get the same error messages."""
    places, titles = sections(kind), headings(kind)
    made = {name: _option(name, field, titles.get(places.get(name, ""))) for name, field in kind.model_fields.items()}
    options = {name: option for name, option in made.items() if option is not None}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        def run(**given: Any) -> None:
            flags = {name: given.pop(name) for name in options}
            command({name: value for name, value in flags.items() if value is not None}, **given)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature([*own, *options.values()])  # type: ignore[attr-defined]
        return run

    return decorate


def _option(name: str, field: FieldInfo, heading: str | None) -> inspect.Parameter | None:
    """Return the option of a setting, or None if only a file sets it."""
    flag = next((one for one in field.metadata if isinstance(one, Flag)), None)
    if flag is None:
        return None
    plain = _plain(field.annotation)
    choices = [str(choice) for choice in get_args(plain)] if get_origin(plain) is Literal else []
    several = get_origin(plain) in (tuple, dict)
    default = flag.default or _in_words(field)
    option = typer.Option(
        None,
        *([f"--{flag.name}"] if flag.name else []),
        f"--{name.replace('_', '-')}" + (f"/--no-{name.replace('_', '-')}" if plain is bool else ""),
        help=flag.help + (" May be repeated." if several else "") + (f" Default: {default}." if default else ""),
        metavar=None if plain is bool else f"<{'|'.join(choices)}>" if choices else KINDS.get(plain, "<text>"),
        autocompletion=(lambda: choices) if choices else None,
        show_default=False,
        rich_help_panel=heading,
    )
    given: Any = bool if plain is bool else list[str] if several else str
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=given | None)


def _plain(annotation: Any) -> Any:
    """Strip None and constraints: int from `Annotated[int, Field(ge=1)] | None`."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if NoneType in get_args(annotation):
        return _plain(next(part for part in get_args(annotation) if part is not NoneType))
    return annotation


def _in_words(field: FieldInfo) -> str:
    """Return the default in words, or "" if there is nothing to say."""
    match field.get_default():
        case bool(value):
            return "yes" if value else "no"
        case int() | str() as value:
            return str(value)
        case float(value):
            return f"{value:g}"
    return ""

"""What the owner of a run may change while its learner runs: one table for the help of `echo-node set`, for its checks
and for the page. lead/steps.py makes the changes; this imports little, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from swarm.errors import UserError
from swarm.settings import Key, LeadConfig
from swarm.settings_file import closest


class Dial(NamedTuple):
    """`accepts` is the type of its values, as pydantic reads them from text. `marks` limit them."""

    kind: Literal["bool", "int", "float", "node", "action"]
    accepts: Any
    help: str
    marks: Sequence[Any] = ()
    unit: str = ""

    def limit(self, *names: str) -> float | None:
        return next((getattr(mark, name) for mark in self.marks for name in names if hasattr(mark, name)), None)


def _dial_of(name: str, unit: str = "") -> Dial:
    """Return the dial of a setting, with its limits."""
    field = LeadConfig.model_fields[name]
    flag = next(mark for mark in field.metadata if isinstance(mark, Key))
    return Dial("int" if field.annotation is int else "float", field.annotation, flag.help, field.metadata, unit)


VALUES = ("bool", "int", "float")  # Kinds of dials that have a value, where others do something
NODE = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
DIALS = {
    "paused": Dial("bool", bool, "true takes no further batch and gives no leases, until false."),
    "max_staleness": _dial_of("max_staleness", "steps"),
    "publish_every_steps": _dial_of("publish_every_steps", "steps"),
    "learning_rate": _dial_of("learning_rate"),
    "max_cost": _dial_of("max_cost"),
    "refuse": Dial("node", NODE, "Bar this sampler, and have others draw what it gave."),
    "let_in": Dial("node", NODE, "Take rollouts of a barred sampler again, as of a newcomer."),
    "checkpoint": Dial("action", Literal["now"], "now writes one of the newest step."),
    "stop": Dial("action", Literal["after-step"], "after-step ends the run as one Ctrl-C does."),
}


def checked(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a request by key, with values of their types. Values may be given as text, "none" to lift
    a limit, and hyphens for underscores. Raise UserError for anything else."""
    found: dict[str, Any] = {}
    for given, value in request.items():
        key, text = given.replace("-", "_"), " ".join(str(value).split())
        if (dial := DIALS.get(key)) is None:
            meant = closest(key, DIALS) or f"; there are {', '.join(DIALS)}"
            raise UserError(f"{given[:64]} cannot be set on a running learner{meant}")
        try:
            kind: Any = Annotated[dial.accepts, Dial, *dial.marks]
            found[key] = TypeAdapter(kind).validate_python(None if text.lower() == "none" else text)
        except ValidationError as error:
            said = str(error.errors()[0]["msg"])
            raise UserError(f"{key} {text[:64]}: {said[0].lower()}{said[1:]}") from error
    return found


def described(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table for the page, with the present values."""
    found: dict[str, dict[str, Any]] = {
        key: {"key": key, "value": values.get(key), "kind": dial.kind, "unit": dial.unit, "help": dial.help}
        | {"min": dial.limit("ge", "gt"), "above": dial.limit("gt"), "max": dial.limit("le")}
        for key, dial in DIALS.items()
    }
    found["publish_every_steps"]["max"] = values["max_staleness"] + 1
    return list(found.values())


def in_words(table: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each present value of the table, with its unit and its help."""
    rows = [
        (one["key"], f"{one['value']} {one['unit']}".strip(), one["help"]) for one in table if one["kind"] in VALUES
    ]
    wide = [max((len(row[at]) for row in rows), default=0) for at in (0, 1)]
    return "\n".join(f"{key:{wide[0]}} = {value:{wide[1]}}  {words}" for key, value, words in rows)

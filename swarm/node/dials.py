"""What the owner of a run may change while its learner runs: one table for the help of `echo-node set`, for its checks
and for the page. node/steps.py carries it out; this imports little, so that `--help` answers at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, TypeAdapter, ValidationError

from swarm.errors import UserError
from swarm.settings import RUNNING, Flag, LeadConfig, closest


class Dial(NamedTuple):
    """`kind` is bool, int, float, node or action. `accepts` is the type of its values, as pydantic reads them from
    text, and `marks` are what limits them."""

    kind: str
    accepts: Any
    help: str
    marks: tuple[Any, ...] = ()

    def limit(self, *names: str) -> float | None:
        return next((getattr(mark, name) for mark in self.marks for name in names if hasattr(mark, name)), None)


NODE = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
FIELDS = {name: field for name, field in LeadConfig.model_fields.items() if RUNNING in field.metadata}
DIALS = {
    "paused": Dial("bool", bool, "true takes no further batch and gives no leases, until false."),
    **{
        name: Dial("int" if field.annotation is int else "float", field.annotation, mark.help, tuple(field.metadata))
        for name, field in FIELDS.items()
        for mark in field.metadata
        if isinstance(mark, Flag)
    },
    "refuse": Dial("node", NODE, "Bar this sampler, and have others draw what it gave."),
    "let_in": Dial("node", NODE, "Take rollouts of a barred sampler again, as of a newcomer."),
    "checkpoint": Dial("action", Literal["now"], "now writes one of the newest step."),
    "stop": Dial("action", Literal["after-step"], "after-step ends the run as one Ctrl-C does."),
}
UNITS = {"max_staleness": "steps", "publish_every_steps": "steps"}


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
            kind: Any = Annotated[dial.accepts, *dial.marks] if dial.marks else dial.accepts
            found[key] = TypeAdapter(kind).validate_python(None if text.lower() == "none" else text)
        except ValidationError as error:
            said = str(error.errors()[0]["msg"])
            raise UserError(f"{key} {text[:64]}: {said[0].lower()}{said[1:]}") from error
    return found


def described(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table for the page, with the present values."""
    return [
        {
            "key": key,
            "value": values.get(key),
            "kind": dial.kind,
            "min": dial.limit("ge", "gt"),
            "max": values["max_staleness"] + 1 if key == "publish_every_steps" else dial.limit("le"),
            "unit": UNITS.get(key, ""),
            "help": dial.help,
        }
        for key, dial in DIALS.items()
    ]

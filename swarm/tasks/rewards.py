"""Rewards of a completion whose right answer is known: pure functions of the two texts, 1 for right and 0 for wrong.

What a model thinks aloud is no answer: everything up to the last `</think>` is left out of what is read.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from typing import Any, NoReturn

from swarm.errors import UserError
from swarm.types import Score

EXTRA = "pip install 'echo-node[tasks]'"

MAX_DIGITS = 200
"""Of a number that is read as one: Python itself refuses to read some thousands."""

MATH_CPU_S = 1.0
"""For one completion; an honest one takes some milliseconds. Of the processor, so that a busy machine judges alike."""

EQUAL = 10
"""Exit status of a child that found both equal. No fault ends with it."""

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_FRACTION = re.compile(r"(?:([0-9]{1,50})\s*)?\\[dt]?frac\s*\{\s*([0-9]{1,50})\s*\}\s*\{\s*([0-9]{1,50})\s*\}")
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    # A sign counts where no number or name stands before it: 7-4 ends with 4, not with -4. `\$` as LaTeX writes it.
    r"(?:(?<![\w)\]}])(?P<sign>[-+\u2212])\\?\$?)?"
    rf"(?<!\w)(?<![0-9]\.)(?P<number>{_WHOLE}(?:\.[0-9]+)?|(?<!\.)\.[0-9]+)(?P<power>[eE][-+]?[0-9]{{1,3}}(?!\w))?"
    rf"(?:\s?/\s?(?P<below>{_WHOLE}))?"
)


def without_thoughts(completion: str) -> str:
    """What follows the last `</think>`; nothing, if a thought was begun and never ended."""
    thought, closed, answer = completion.rpartition("</think>")
    if not closed and "<think>" in answer:
        return ""
    return answer if closed else thought + answer


def before_stop(completion: str, stops: Sequence[str]) -> str:
    """What stands before the first stop string; the token that completed one may have said more."""
    return completion[: min((at for stop in stops if (at := completion.find(stop)) >= 0), default=len(completion))]


def last_box(text: str) -> str | None:
    r"""The content of the `\boxed{}` that is closed last; None if there is none."""
    found, opened = None, list[int]()
    for match in _BRACES.finditer(text):
        if match[0] != "}":
            # Where a box begins; 0, which no box can, for another brace.
            opened.append(match.end() if len(match[0]) > 1 else 0)
        elif opened and (begin := opened.pop()):
            found = text[begin : match.start()]
    return found


def last_number(text: str) -> Fraction | None:
    r"""The last number of a text, such as 1,234.5 or -3/4 or \frac{3}{4} or 1e-3 or \$12; a `\boxed{}` with a number in
    it goes before whatever follows it."""
    boxed = _last_number(last_box(text) or "")
    return _last_number(text) if boxed is None else boxed


def _last_number(text: str) -> Fraction | None:
    plain = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    found = None
    for match in _NUMBER.finditer(_FRACTION.sub(_as_ratio, plain)):
        found = match
    return _value(found) if found is not None else None


def _as_ratio(match: re.Match[str]) -> str:
    whole, above, below = (int(part or 0) for part in match.groups())
    return f"{whole * below + above}/{below}"


def _value(match: re.Match[str]) -> Fraction | None:
    if len(match[0]) > MAX_DIGITS:
        return None
    value = Fraction(match["number"].replace(",", "") + (match["power"] or ""))
    if match["below"] is not None:
        below = int(match["below"].replace(",", ""))
        if below == 0:
            return None
        value /= below
    return -value if match["sign"] in ("-", "\u2212") else value


def exact(completion: str, answer: str) -> float:
    """The answer and nothing else, but for white space around it."""
    return float(without_thoughts(completion).strip() == answer.strip())


def numeric(completion: str, answer: str) -> float:
    """The last number of the completion equals the last of the answer, exactly: 0.50 is 1/2, 0.33 is not 1/3."""
    expected = last_number(answer)
    return float(expected is not None and last_number(without_thoughts(completion)) == expected)


def math(completion: str, answer: str) -> float:
    """math-verify finds the completion's final expression equal to the answer's, or it is the same text.

    One that takes longer than MATH_CPU_S, or more memory than there is, is wrong: `9^{9^{9^9}}` is evaluated as it
    stands, and neither a handler of a signal nor another thread would end that. So a child does it.
    """
    _load_math_verify()
    with warnings.catch_warnings():
        # Python warns of forks where there are threads. The child uses none of theirs, and ends by itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _end_with_verdict(completion, answer)
    _, status = os.waitpid(child, 0)
    return float(os.waitstatus_to_exitcode(status) == EQUAL)


@cache
def _load_math_verify() -> None:
    """Here and not in each child: libraries, and what its parser learns of the forms that answers mostly have."""
    for text in (r"\boxed{\frac{12}{5}}", r"$x^2 + 3\sqrt{2}$", "it is 3.5, not -1,000"):
        _equal(text, text.removeprefix("it is "))


def _end_with_verdict(completion: str, answer: str) -> NoReturn:
    status = os.EX_OK
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, MATH_CPU_S)
        status = EQUAL if _equal(completion, answer) else os.EX_OK
    finally:
        os._exit(status)


def _equal(completion: str, answer: str) -> bool:
    expected = _parse(answer if "$" in answer or "\\boxed" in answer or "\\(" in answer else f"${answer}$")
    if not expected:
        return exact(completion, answer) == 1.0
    from math_verify import verify

    found = _parse(without_thoughts(completion))
    return bool(verify(expected, found, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    # Its warning that nothing is timed would be said once a process.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse

    return list(parse(text, parsing_timeout=None))


def boxed(completion: str, answer: str) -> float:
    r"""There is an answer in a closed `\boxed{}`, right or wrong. A small weight of it teaches the form."""
    return float(bool((last_box(without_thoughts(completion)) or "").strip()))


Reward = Callable[[str, str], float]
"""(completion, answer) to a number."""

REWARDS: dict[str, Reward] = {"exact": exact, "numeric": numeric, "math": math, "boxed": boxed}

CORRECTNESS = ("exact", "numeric", "math")
"""Rewards that say whether the answer is right: any of those asked for decides what counts as solved."""


@cache
def _has_math_verify() -> bool:
    return find_spec("math_verify") is not None


def checked_weights(weights: Mapping[str, float]) -> dict[str, float]:
    """The weights asked for, exact alone if there are none. UserError for a reward that is not there."""
    for name in weights:
        if name not in REWARDS:
            raise UserError(f"there is no reward {name!r}; known rewards: {', '.join(REWARDS)}")
    if "math" in weights and not _has_math_verify():
        raise UserError(f"the reward math needs a package that is not installed: {EXTRA}")
    return dict(weights) or {"exact": 1.0}


def weighted_score(weights: Mapping[str, float], completion: str, answer: str, stops: Sequence[str] = ()) -> Score:
    """The weighted sum of rewards, each of them in `parts` as it was before.

    The stop string that ended a completion is part of it: `}` may close a box. `exact` alone reads up to there.
    """
    bare = before_stop(completion, stops)
    parts = {name: REWARDS[name](bare if name == "exact" else completion, answer) for name in weights}
    right = [parts[name] for name in CORRECTNESS if name in parts] or [exact(bare, answer)]
    return Score(
        reward=sum(weights[name] * value for name, value in parts.items()), exact=max(right) == 1.0, parts=parts
    )

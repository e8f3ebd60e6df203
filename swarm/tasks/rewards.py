"""Rewards of completions whose right answer is known: pure functions of the two texts, 1 for right and 0 for wrong.

Thoughts are not part of the answer: everything up to the last `</think>` is left out.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import unicodedata
import warnings
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from importlib.util import find_spec
from itertools import product, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from swarm.errors import UserError
from swarm.extras import how_to_have
from swarm.tasks.functions import check_function, is_function
from swarm.types import PART_NAME_LENGTH, Score

EXTRA = how_to_have("tasks")
MAX_DIGITS = 200  # In one number; Python itself refuses a few thousand
ASIDE_CPU_S = 1.0  # CPU time for one completion, so a busy machine changes nothing; a normal one takes milliseconds
RELATIVE = 2e-6  # Largest relative difference of numbers that count as equal: 0.333333 is 1/3
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|[{}]")
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]{1,3}(?:[ ][0-9]{3})+(?![0-9])|[0-9]++)"
JOIN = "\ue000"  # Put after each superscript or subscript character, since several may form one number
_STARTS = r"(?<!\w)(?<![0-9]\.)"
_PART = r"[ ]?(?:\{{[ ]?(?P<{0}>[-+]?[0-9.,]{{1,50}})[ ]?\}}|(?P<{0}_digit>[0-9]))"
_POWER = r"[ ]?\^[ ]?\{{?[ ]?(?P<{0}>[-+]?[0-9]++)"
SCALES = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
# Repeats are possessive or fail at once, so that hostile text takes linear time.
_NUMBER = re.compile(
    rf"""
    (?=[-+.\\^_0-9\u00b1\u221a])(?:
    [\^_]\{{?[-+]?[0-9]++     # a power or an index of something else: m^2
    |
    # A sign counts where no number or name stands before it: 7-4 ends with 4, not with -4. `\$` as LaTeX writes it.
    (?:(?<![\w)\]}}])(?P<sign>[-+])\\?\$?)?
    (?:
        (?:{_STARTS}(?P<units>[0-9]++)[ ]?)?\\[dtc]?frac{_PART.format("top")}{_PART.format("bottom")}
        | {_STARTS}(?P<whole>[0-9]++)[ ](?P<above>[1-9][0-9]*+)/(?P<under>[0-9]++)
        | {_STARTS}(?P<number>{_WHOLE}(?:\.[0-9]++)?|(?<!\.)\.[0-9]++)
          (?:(?P<e>[eE][-+]?[0-9]{{1,3}}(?!\w))|{_POWER.format("power")})?
          (?:[ ]?(?:\\times|\\cdot|[x*\u00d7\u00b7\u22c5])[ ]?10{_POWER.format("ten")})?
          (?:\s?/\s?(?P<below>{_WHOLE}))?
          (?:[ ](?P<scale>(?i:{"|".join(SCALES)}))\b)?
    )
    (?P<percent>[ ]?\\?%)?
    # No part of a longer expression is read: 12:30, 1/2/2024, 3.14.15, 2,5, 0x1F, 10x10, 2\pi.
    (?![.,':/]?[0-9] | [xX][0-9a-fA-F] | [ ]?(?:\u03c0|\\pi\b|\u221a|\\sqrt))
    |
    (?P<unread>\\[dtc]?frac(?:[ ]?(?:\{{(?:[^{{}}]|\{{[^{{}}]*+\}})*+\}}|.)){{2}}
        | (?:(?:\u00b1|\\pm\b|\u221a|\\sqrt(?:\[[0-9]\])?\{{?)[ ]?)?{_STARTS}(?:(?<!\.)\.)?[0-9](?:[.,':/]*[0-9])*+)
    )
    """,
    re.VERBOSE,
)
_WORDS = re.compile(r"\\text(?:bf|it|rm)?\{([^{}]*+)\}")  # Unwrapped, so that a sign after it counts
_GROUPED = re.compile(  # As written in other countries: 1.234,56, 1 234,56, 1.234.567, 1'234, 1_234, 12,34,567
    r"(?<![0-9.,'_])(?<![0-9][ ])[0-9]{1,3}(?:(?:([. '])[0-9]{3}(?:\1[0-9]{3})*,(?![0-9]{3}\b)[0-9]++"
    r"|(?:\.[0-9]{3}){2,}|(['_])[0-9]{3}(?:\2[0-9]{3})*(?:\.[0-9]++)?)|(?:,[0-9]{2})+,[0-9]{3})(?![.,'_]?[0-9])"
)
_SPACED_SIGN = re.compile(r"(^(?=[ ]*[-+][ .,/0-9]+$)|[=:<>(\[{,&*|\u2248\u2264\u2265])[ ]*([-+])[ ]+(?=[0-9.\\$])")
_IN_PART = re.compile(  # What math-verify would read only in part: a base, a sequence, a repeating decimal
    r"[0-9]_\{?[0-9]|\\[lcdv]?dots|[,+]\s*(?:\.\.\.|\u2026)|[0-9]\.[0-9]*\\(?:overline|dot|bar)\b"
)
_DATE_OR_TIME = re.compile(r"\b[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}\b|\b[0-9]{1,2}([-/.])[0-9]{1,2}\1[0-9]{2,4}\b|:0[0-9]\b")
_FLOAT = re.compile(r"(?<![\w.])([0-9]++\.?[0-9]*+)[eE]([-+]?[0-9]{1,3})(?!\w)")
_LEAD = re.compile(r"\banswer\b[ *]{0,4}(?:is\b[ ]?:?|[:=])", re.IGNORECASE)
_AROUND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf)\{(.*)\}|\((\w{1,3})\)|(\w)\)")


class _Ascii(dict[int, str]):
    """The ASCII form of a character in a number, computed at its first use: `\u00b2` is `^{2}`, `\u00bd` is 1/2."""

    def __missing__(self, code: int) -> str:
        own = chr(code)
        kind = unicodedata.decomposition(own).partition(" ")[0]
        plain = unicodedata.normalize("NFKC", own).translate(_MARKS)
        if (digit := unicodedata.decimal(own, None)) is not None:
            found = str(digit)
        elif kind in ("<super>", "<sub>"):
            found = f"{'^' if kind == '<super>' else '_'}{{{plain}}}{JOIN}"
        elif kind in ("<wide>", "<narrow>", "<small>", "<fraction>") or code in _MARKS:
            found = plain
        else:
            found = {"Zs": " ", "Pd": "-"}.get(unicodedata.category(own), own)
        self[code] = found
        return found


_MARKS = str.maketrans("\u2212\u2044\u2215\u2019\u066a\u066b\u066c\u2014", "-//'%.,\u2014")  # A long dash stays one
_ASCII = _Ascii({ord("~"): " "})


class Number(NamedTuple):
    """A number. `percent`: a percent sign follows it, which does not change `value`."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """Whether they are exactly equal. 50% equals 0.5, and 50, since the sign is often left out; 0.5% is not 50%."""
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


def without_thoughts(completion: str) -> str:
    """The text after the last `</think>`; "" if a thought was begun and not ended."""
    thought, closed, answer = completion.rpartition("</think>")
    if not closed and "<think>" in answer:
        return ""
    return answer if closed else thought + answer


def before_stop(completion: str, stops: Sequence[str]) -> str:
    """The text before the first stop string. The token that completed it may contain more characters."""
    return completion[: min((at for stop in stops if (at := completion.find(stop)) >= 0), default=len(completion))]


def last_box(text: str) -> str | None:
    r"""The content of the `\boxed{}` that is closed last, or None."""
    found, opened = None, list[int]()
    for match in _BRACES.finditer(text):
        if match[0] != "}":
            # Where a box begins; for another brace 0, where no box can begin.
            opened.append(match.end() if len(match[0]) > 1 else 0)
        elif opened and (begin := opened.pop()):
            found = text[begin : match.start()]
    return found


def last_number(text: str) -> Number | None:
    r"""The last number of a text, such as 1,234.5, -3 1/2, \frac{3}{4}, 1.5 \times 10^3, 1e-3, \$12 or 50%.

    A number in a `\boxed{}` takes precedence over numbers after it.
    """
    box = last_box(text) or ""
    return _last_number(box if any(map(str.isnumeric, box)) else text)


def _last_number(text: str) -> Number | None:
    plain = _WORDS.sub(r" \1 ", text.replace("{,}", ",").replace("\\,", "").replace("\\!", ""))
    plain = re.sub("(?<=[0-9])(?=[\u00bc-\u00be\u2150-\u215e])", " ", plain).translate(_ASCII)
    plain = re.sub(rf"\}}{JOIN}(?:[_^]\{{)?", lambda join: "" if join[0][-1] == "{" else "}", plain)
    plain = _SPACED_SIGN.sub(r"\1\2", _GROUPED.sub(_without_groups, plain))
    found = None
    for match in _NUMBER.finditer(plain):
        found = found if match[0][0] in "^_" else match
    if found is None or found["unread"] or len(found[0]) > MAX_DIGITS:
        return None
    try:
        value = _value(found)
    except (ValueError, ZeroDivisionError):
        return None
    return Number(-value if found["sign"] == "-" else value, bool(found["percent"]))


def _without_groups(match: re.Match[str]) -> str:
    plain = match[0].replace(match[1] or match[2] or ("," if "," in match[0] else "."), "")
    return plain.replace(",", ".") if match[1] else plain


def _value(match: re.Match[str]) -> Fraction:
    """The absolute value. ValueError or ZeroDivisionError if it is not a number."""
    if match["above"] is not None:
        return _mixed(match["whole"], _fraction(match["above"]), _fraction(match["under"]))
    if match["number"] is None:
        top, bottom = match["top"] or match["top_digit"], match["bottom"] or match["bottom_digit"]
        return _plus_whole(match["units"], _fraction(top) / _fraction(bottom))
    value = _power(_fraction(match["number"] + (match["e"] or "")), match["power"] or "1")
    value *= _power(Fraction(10), match["ten"] or "0") * SCALES.get((match["scale"] or "").lower(), 1)
    return value / _fraction(match["below"] or "1")


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").replace(" ", ""))


def _power(base: Fraction, exponent: str) -> Fraction:
    power = int(_fraction(exponent))
    if abs(power) > MAX_DIGITS:
        raise ValueError("it would have too many digits")
    return base**power


def _mixed(whole: str, above: Fraction, under: Fraction) -> Fraction:
    """3 1/2 is 3.5, but the space in 1 500/3 separates thousands."""
    if above > under and len(whole) <= 3 and 100 <= above < 1000:
        return (int(whole) * 1000 + above) / under
    return _plus_whole(whole, above / under)


def _plus_whole(whole: str | None, fraction: Fraction) -> Fraction:
    """Only a proper fraction makes a mixed number: 3 1/2 is 3.5, and the last number of 5 7/2 is 7/2."""
    return int(whole or 0) + fraction if 0 < fraction < 1 else fraction


def exact(completion: str, answer: str) -> float:
    """Whether the completion is the answer, but for white space around it."""
    return float(without_thoughts(completion).strip() == answer.strip())


def lenient(completion: str, answer: str) -> bool:
    """Whether it is the answer, ignoring case, dots at the end and what people put around it: `The answer is (B).`,
    `**B**`, a box.

    Reads the rest of the line after the last `answer is` or `answer:`, else the last box, else the whole completion.
    """
    text = without_thoughts(completion)
    ends = [match.end() for match in _LEAD.finditer(text)]
    line = text[ends[-1] :].partition("\n")[0] if ends else last_box(text) or text
    # Another sentence may follow on the same line.
    return bool(wanted := _bare(answer)) and wanted in (_bare(line), _bare(line.partition(". ")[0]))


def _bare(text: str) -> str:
    bare = (last_box(text) or text).casefold()
    # Wrappings: `$\textbf{(B)}$.` has three, so four will do.
    for _ in range(4):
        bare = bare.strip(" \t\r\n.*`\"'$")
        if (inside := _AROUND.fullmatch(bare)) is not None:
            bare = next(part for part in inside.groups() if part is not None)
    return bare


def numeric(completion: str, answer: str) -> float:
    """Whether the last numbers of completion and answer are exactly equal: 0.50 is 1/2, 0.33 is not 1/3."""
    expected, found = last_number(answer), last_number(without_thoughts(completion))
    return float(expected is not None and found is not None and found.equals(expected))


def math(completion: str, answer: str) -> float:
    """Whether the completion's final expression is the answer's text, or math-verify finds the two equal. Only the text
    counts where it would read just a part: dates, times, bases, sequences with dots, repeating decimals.

    It is computed in a child process, since math-verify would evaluate `9^{9^{9^9}}`.
    """
    _load_math_verify()
    return aside(lambda: _equal(completion, answer)) or 0.0


def aside(compute: Callable[[], float]) -> float | None:
    """`compute()` in a child process. None if it raises, takes longer than ASIDE_CPU_S, or runs out of memory. A signal
    handler or a thread could not do this: they cannot interrupt a single power of large numbers."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python warns about a fork in a process with threads. The child uses none of their locks, and ends by itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _end_with(compute, writing)
    os.close(writing)
    with open(reading, "rb") as pipe:
        result = pipe.read()
    os.waitpid(child, 0)
    return float(result) if result else None


def _end_with(compute: Callable[[], float], writing: int) -> NoReturn:
    try:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, ASIDE_CPU_S)
        os.write(writing, repr(float(compute())).encode())
    finally:
        os._exit(0)


@cache
def _load_math_verify() -> None:
    """Load the libraries and warm up their parser with common forms of answers, here once instead of in each child."""
    for text in (r"\boxed{\frac{12}{5}}", r"$x^2 + 3\sqrt{2}$", "it is 3.5, not -1,000"):
        _equal(text, text.removeprefix("it is "))


def _equal(completion: str, answer: str) -> bool:
    given = without_thoughts(completion)
    if _bare_text(given) == _bare_text(answer):
        return True
    if _IN_PART.search(answer) or _DATE_OR_TIME.search(answer) or _IN_PART.search(last_box(given) or ""):
        return False
    from math_verify import verify

    expected = _parse(answer if "$" in answer or "\\boxed" in answer or "\\(" in answer else f"${answer}$")
    pairs = product(expected, _parse(given))
    return any(verify([one], [other], timeout_seconds=None) and not _are_apart(one, other) for one, other in pairs)


def _bare_text(text: str) -> str:
    bare = re.sub(r"\$|\\[,;!]|(?<=[_^])\{(?=\w\})|(?<=[_^]\{\w)\}", "", last_box(text) or text)
    return re.sub(r"\s*,\s*", ",", " ".join(bare.split()))


def _are_apart(one: Any, other: Any) -> bool:
    """Whether numbers that math-verify finds equal differ by more than RELATIVE: it rounds to six decimals, so that all
    tiny numbers are equal. Like it, this lets 50% equal 50."""
    pairs = zip_longest(_values(one), _values(other))
    return any(
        None not in pair
        and (largest := max(map(abs, pair))) > 0
        and abs(pair[0] - pair[1]) > RELATIVE * largest
        and not (largest > 1e-3 and abs(min(map(abs, pair)) * 100 / largest - 1) < RELATIVE)
        for pair in pairs
    )


def _values(found: Any) -> list[Any]:
    """The numbers in a sympy expression that is a number or a list of numbers; none for any other expression."""
    from sympy import FiniteSet, Interval, Matrix, Tuple  # type: ignore[import-untyped]

    if getattr(found, "is_number", False) and found.is_finite:
        return [found.evalf(20)]
    parts = found if isinstance(found, Matrix) else getattr(found, "args", ())
    is_list = isinstance(found, (FiniteSet, Interval, Matrix, Tuple))
    values = [value for part in parts for value in _values(part)] if is_list else []
    return sorted(values, key=lambda value: complex(value).real) if isinstance(found, FiniteSet) else values


def _parse(text: str) -> list[Any]:
    # math-verify would warn in every process that parsing has no time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    from math_verify import parse

    # As LaTeX, 1.6e-19 would be 1.6 times Euler's number, minus 19.
    return list(parse(_FLOAT.sub(r"\1\\times 10^{\2}", text), parsing_timeout=None))


def boxed(completion: str, answer: str) -> float:
    r"""Whether there is an answer in a closed `\boxed{}`, right or wrong. A small weight teaches the form."""
    return float(bool((last_box(without_thoughts(completion)) or "").strip()))


Reward = Callable[[str, str], float]  # (completion, answer) to a number
REWARDS: dict[str, Reward] = {"exact": exact, "numeric": numeric, "math": math, "boxed": boxed}
CORRECTNESS = ("exact", "numeric", "math")  # Rewards that decide whether a completion counts as solved
LENIENT = ("exact", "math")  # Rewards that the setting `lenient` changes


def checked_weights(weights: Mapping[str, float], *, is_lenient: bool = False) -> dict[str, float]:
    """The weights; by default `exact` alone. UserError for a reward that does not exist or cannot be computed here, and
    for `is_lenient` if it would change none of them."""
    for name in weights:
        if is_function(name):
            check_function(name)
        elif name not in REWARDS:
            known = ", ".join(REWARDS)
            raise UserError(f"there is no reward {name!r}; known rewards: {known}, or FILE.py:FUNCTION of your own")
    if len({_shown(name) for name in weights}) < len(weights):
        raise UserError(f"two rewards have one name in the figures: {', '.join(weights)}; call one file otherwise")
    if "math" in weights and find_spec("math_verify") is None:
        raise UserError(f"the reward math needs a package that is not installed: {EXTRA}")
    chosen = dict(weights) or {"exact": 1.0}
    if is_lenient and not set(chosen) & set(LENIENT) and set(chosen) & set(CORRECTNESS):
        raise UserError("lenient changes only the rewards exact and math: ask for one of these, or leave lenient out")
    return chosen


def weighted_score(
    weights: Mapping[str, float],
    completion: str,
    answer: str,
    stops: Sequence[str] = (),
    *,
    is_lenient: bool = False,
    own: Mapping[str, float | None] = MappingProxyType({}),
) -> Score:
    """The weighted sum of rewards; `parts` has each of them unweighted. A completion still has the stop string that
    ended it (`}` may close a box); only `exact` leaves it out. `is_lenient`: an answer that `lenient`
    accepts is right for `exact` and `math` too. `own` are what the user's functions gave: without a reward of
    CORRECTNESS, 1 or more by any of them is right."""
    bare = before_stop(completion, stops)
    found = is_lenient and (lenient(bare, answer) or lenient(completion, answer))

    def part(name: str) -> float:
        if found and name in LENIENT:
            return 1.0
        return REWARDS[name](bare if name == "exact" else completion, answer)

    figures = {name: own[name] if name in own else part(name) for name in weights}
    given = {name: value for name, value in figures.items() if value is not None}
    right = [given[name] for name in CORRECTNESS if name in given]
    right = right or [given.get(name, 0.0) for name in own] or [part("exact")]
    return Score(
        reward=sum(weights[name] * value for name, value in given.items()),
        exact=max(right) >= 1.0,
        parts={_shown(name): value for name, value in given.items()},
    )


def _shown(name: str) -> str:
    """The name of a reward in the figures: of a path only the end."""
    return name.rpartition("/")[2][-PART_NAME_LENGTH:]

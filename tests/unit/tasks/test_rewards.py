"""Rewards of answers: what counts as the number, the box and the same mathematics."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.tasks import rewards
from swarm.tasks.rewards import boxed, checked_weights, exact, last_box, last_number, math, numeric, weighted_score


def read(text: str) -> Fraction | None:
    found = last_number(text)
    return found.value if found is not None else None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        # A sign counts where no number or name stands before it.
        *(("so ...42", "42"), ("7-4", "4"), ("5 - 3", "3"), ("x=-5", "-5"), ("+7", "7"), ("x = - 5", "-5")),
        *(("x = \u20135", "-5"), ("\uff0d\uff15", "-5"), ("3\u20135", "5"), ("it \u2014 5", "5")),
        *((r"\boxed{- 5}", "-5"), ("as follows:\n- 5", "5"), (r"\text{Answer: }-5", "-5"), ("- 5 apples", "5")),
        ("$10$ - $3$", "3"),
        *(("it costs -$5", "-5"), ("$-12$", "-12"), (r"\$12", "12"), ("-.5", "-0.5"), (".5", "0.5")),
        # Fractions and mixed numbers.
        *((r"\frac{-3}{4}", "-3/4"), (r"-\frac{-3}{4}", "3/4"), (r"\frac12", "1/2"), (r"\frac1{2}", "1/2")),
        *((r"\frac 1 2", "1/2"), (r"\dfrac{1{,}000}{3}", "1000/3"), (r"\frac{1.5}{2}", "3/4"), (r"3\frac12", "7/2")),
        *((r"5\frac{7}{2}", "7/2"), ("5 7/2", "7/2"), ("1 500/3", "500"), ("1 000/3", "1000/3"), ("5\u20442", "5/2")),
        *((r"$-\frac{3}{4}$", "-3/4"), ("3\u00bd", "7/2"), ("x = -\u215e", "-7/8")),
        # Powers, scales, units and indices.
        *(("10^3", "1000"), ("10^{-3}", "1/1000"), ("2^10 ways", "1024"), (r"1.5 \times 10^3", "1500")),
        *((r"$-1.5 \cdot 10^{-3}$", "-3/2000"), ("1.5 \u00d7 10^3", "1500"), ("3 x 4", "4"), ("10\u00b2", "100")),
        *(("3 \u00d7 10\u207b\u2075", "0.00003"), ("6.02\u00d710\u00b2\u00b3", "6.02e23"), ("5 million", "5000000")),
        *(("2 Million", "2000000"), ("12 m^2", "12"), ("12 m\u00b2", "12"), ("20cm2", "20"), (r"90^\circ", "90")),
        *(("x_1 = 3", "3"), ("x\u2081\u2082 = 5", "5"), (r"\sum_{i=1}^{10} is 7", "7"), (r"{10}^{-3} m and 4", "4")),
        *((r"50\%", "50"), ("50\uff05", "50"), ("H2O boils at 100 C", "100")),
        # Separators of groups, and digits of the world.
        *(("1 2 3", "3"), ("12 34", "34"), ("2024 100", "100"), ("1 0000", "0"), ("week 1 100,000", "100000")),
        *(("\u0661\u0662\u066b\u0665", "12.5"), ("\u0967\u0968", "12"), ("1.234.567", "1234567")),
        *(("1 234,5", "1234.5"), ("1'234'567.5", "1234567.5"), ("1\u2019234", "1234"), ("1_000_000", "1000000")),
        *(("1.234,56", "1234.56"), ("12,34,567", "1234567")),
        # A box comes first.
        *((r"\boxed{12}, since 7 is less", "12"), (r"\boxed{1} or rather \boxed{2}", "2"), ("5+5=10 #### 72", "72")),
        *((r"\boxed{\frac{1}{3}}", "1/3"), (r"\boxed{\text{none}} 7", "7")),
    ],
)
def test_the_last_number_is_read(text: str, number: str) -> None:
    assert read(text) == Fraction(number)


@pytest.mark.parametrize(
    "text",
    [*("", "none", "v2", "m^2", "3/0", r"\frac{1}{0}", r"\frac{1.2.3}{4}", "0^{-1}"), *("9" * 5000, "9^999999999")],
)
def test_no_number_is_read_where_none_is_or_none_can_be(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"\boxed{" * 50_000 + "7" + "}" * 50_000 + "8", 7),
        ("-" * 400_000 + "7", -7),
        *((part * 80_000 + " 8", 8) for part in ("1,", r"\frac{", "1 ", "\u00b2", r"\frac{1}{", "1 x 10", "10^")),
        *((part * 80_000 + "=8", 8) for part in ("111 ", "1.111", "1 111 ", "/ ", "1 1/", r"\boxed{")),
        ("9" * 300_000 + "/ 8 =8", 8),
    ],
    ids=lambda value: value[:9] if isinstance(value, str) else "",
)
def test_hostile_text_is_read_as_other_text_is(text: str, number: int) -> None:
    """Quadratic readers would take minutes of it, which the test's own time limit does not give."""
    assert read(text) == number


def grouped(whole: int, separator: str) -> str:
    return f"{whole:,}".replace(",", separator)


UNREAD = [
    *("1/2/2024", "3.14.15", "12:30", "2,5", "a, b, 10,20", "1,2345", "0x1F", "10x10", "1.5,5"),
    *("2\u03c0", r"2\pi", r"\frac{\pi}{2}", r"\frac{1}{2}\pi", r"\frac{\sqrt{3}}{2}", r"\sqrt{2}", "\u221a2"),
    *(r"2\sqrt{3}", "\u00b15", r"\pm 5", r"\boxed{12:30} so 5"),
]


@pytest.mark.parametrize("text", UNREAD)
def test_what_is_not_understood_is_not_read_in_part(text: str) -> None:
    """Else a wrong answer passes by its last digits."""
    assert last_number(f"it is {text}") is None
    assert numeric(text, text) == 0


@given(
    around=st.sampled_from(["{}", "it is {}.", r"\boxed{{{}}}", "${}$", r"= {}\%", "{} dollars", "**{}**"]),
    separator=st.sampled_from(["", ",", " ", "\u202f", "\u00a0", "{,}", r"\,"]),
    whole=st.integers(0, 10**9),
    decimals=st.text("0123456789", max_size=4),
    sign=st.sampled_from(["", "-", "\u2212"]),
)
def test_a_decimal_reads_back_however_it_is_written(
    around: str, separator: str, whole: int, decimals: str, sign: str
) -> None:
    point = "." if decimals else ""
    expected = Fraction(f"{whole}{point}{decimals}") * (-1 if sign else 1)
    assert read(around.format(f"{sign}{grouped(whole, separator)}{point}{decimals}")) == expected


@given(above=st.integers(-(10**6), 10**6), below=st.integers(1, 10**6))
def test_a_fraction_reads_back_however_it_is_written(above: int, below: int) -> None:
    expected = Fraction(above, below)
    whole, rest = divmod(abs(above), below)
    sign = "-" if above < 0 else ""
    for text in (
        f"{above}/{below}",
        f"{above} / {below}",
        rf"\frac{{{above}}}{{{below}}}",
        rf"{sign}\dfrac{{{abs(above)}}}{{{below}}}",
        *([f"{sign}{whole} {rest}/{below}", rf"{sign}{whole}\frac{{{rest}}}{{{below}}}"] if rest and whole else []),
    ):
        assert read(f"so x = {text}.") == expected, text


@given(digits=st.integers(1, 10**6), power=st.integers(-30, 30))
def test_powers_of_ten_read_back_however_they_are_written(digits: int, power: int) -> None:
    expected = digits * Fraction(10) ** power
    for text in (rf"{digits} \times 10^{{{power}}}", f"{digits} x 10^{power}", f"{digits}e{power}"):
        assert read(f"about {text}, I think") == expected, text


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        *(("so 1,000 in all", "1000", 1), ("0.50", "1/2", 1), ("0.33", "1/3", 0), ("<think>72</think> 71", "72", 0)),
        *(("72", "24*3=72 #### 72", 1), ("none", "72", 0), ("72", "seventy-two", 0), ("none", "none", 0)),
        # A percent sign is a unit or a hundredth.
        *(("50%", "50%", 1), ("50%", "50", 1), ("50", r"50\%", 1), ("50%", "0.5", 1), ("1/2", "50%", 1)),
        *(("0.5%", "50%", 0), ("50%", "5000", 0), ("0.5", "50", 0)),
    ],
)
def test_numeric_compares_the_last_numbers(completion: str, answer: str, right: float) -> None:
    assert numeric(completion, answer) == right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        *(("The answer is (B).", "B", True), ("b", "B", True), ("B)", "(B)", True), ("paris.", "Paris", True)),
        *(("**Answer:** B", "B", True), (r"Hence $\boxed{\textbf{(B)}}$.", "B", True)),
        *(("The answer is A.\nNo, the answer is B. I am sure.", "B", True), ("The answer is 3.5.", "3.5", True)),
        *(("The answer is (C).", "B", False), ("The answer is A, not B", "B", False), ("It may be B", "B", False)),
        *(("<think>the answer is B</think> A", "B", False), ("(1,2)", "[1,2)", False), ("", ".", False)),
    ],
)
def test_lenient_reads_past_case_dots_and_what_stands_around(completion: str, answer: str, right: bool) -> None:
    loose = weighted_score({"exact": 1.0, "math": 1.0}, completion, answer, is_lenient=True)
    assert set(loose.parts.values()) == ({1.0} if right else {0.0})
    assert weighted_score({"exact": 1.0}, completion, answer).reward == 0.0


def test_lenient_changes_no_other_reward() -> None:
    strict = weighted_score({"numeric": 1.0, "boxed": 1.0, "exact": 1.0}, "The answer is (B).", "B", is_lenient=True)
    assert strict.parts == {"numeric": 0.0, "boxed": 0.0, "exact": 1.0}
    with pytest.raises(UserError, match="lenient changes only the rewards exact and math"):
        checked_weights({"numeric": 1.0}, is_lenient=True)
    assert checked_weights({"boxed": 1.0}, is_lenient=True)


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        *((" 42\n", 1), ("<think>41? no</think>\n42", 1), ("41?</think>42", 1)),
        *(("<think>42", 0), ("It is 42", 0), ("4 2", 0)),
    ],
)
def test_exact_asks_for_the_answer_alone(completion: str, right: float) -> None:
    assert exact(completion, "42") == right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        *((r"hence \boxed{\frac{2}{4}}", "1/2", 1), (r"it is $1+x^2$", "x^2+1", 1), (r"it is $x^2$", "x^2+1", 0)),
        *(("no idea", "1/2", 0), (r"<think>$\frac12$</think> 3", r"$\frac{1}{2}$", 0), ("$9^{9^{9^9}}$", "7", 0)),
        # What is tiny is compared as what is large is.
        (r"\boxed{1.6\times 10^{-19}}", r"9.1\times 10^{-31}", 0),
        (r"\boxed{1.6e-19}", r"1.6\times 10^{-19}", 1),
        (r"\boxed{\frac{2}{2^{100}}}", r"\frac{1}{2^{99}}", 1),
        (r"\boxed{\frac{1}{2006!}}", r"\frac{1}{2004!}", 0),
        (r"\boxed{(1,10^{-9})}", r"(1,10^{-10})", 0),
        *((r"\boxed{10^{-7}}", "0", 0), (r"\boxed{0.333333}", "1/3", 1), (r"\boxed{0.5}", r"50\%", 1)),
        # The same text is right, whatever the library makes of it.
        *(("Yes", "Yes", 1), ("No", "Yes", 0), ("June 20", "June 20", 1)),
        # What it would read in part, or as a calculation, is compared as text alone.
        *(("2024-05-17", "2024-05-17", 1), ("2024-17-05", "2024-05-17", 0), (r"\boxed{12:30}", "2:05", 0)),
        *((r"\boxed{101_3}", "101_2", 0), (r"\boxed{101_3}", "101", 0), (r"\boxed{101_{2}}", "101_2", 1)),
        *((r"\boxed{1, 2, \ldots}", r"1, 3, \ldots", 0), (r"\boxed{0.\overline{6}}", r"0.\overline{3}", 0)),
        *(("3.14.15", "3.14.16", 0), ("I think... 7", "7", 1), (r"\boxed{12_8}", "12_{8}", 1)),
        # A line that shows its working, and what is a calculation.
        *(("So 10-2-3 = 5", "5", 1), ("The sum is $1+2+\\cdots+10 = 55$.", "55", 1), (r"\boxed{10-5-2}", "3", 1)),
        *(("From 2024-01-02 on, the answer is $7$.", "7", 1), (r"\boxed{3:20}", r"\frac{3}{20}", 1)),
        *(("1 2", "12", 0), (r"\boxed{3 1/2}", "31/2", 0), (r"$\{5, 1.414214\}$", r"\{5, \sqrt{2}\}", 1)),
    ],
)
def test_math_compares_mathematics(completion: str, answer: str, right: float) -> None:
    assert math(completion, answer) == right


@pytest.mark.parametrize(
    ("text", "content"),
    [
        *((r"\boxed{a{b}c}", "a{b}c"), (r"\boxed{a \boxed{b}", "b"), (r"\boxed{a", None)),
        *(("} { }", None), (r"\fbox {x}", "x"), (r"\boxed{ }", " ")),
    ],
)
def test_boxed_asks_for_the_last_closed_box_whatever_is_in_it(text: str, content: str | None) -> None:
    assert last_box(text) == content
    assert boxed(text, "y") == bool((content or "").strip())


@pytest.mark.parametrize(
    ("weights", "completion", "solved"),
    [
        ({"exact": 1.0, "numeric": 0.1}, "it is 7", True),
        ({"exact": 1.0}, "it is 7", False),
        ({"boxed": 1.0}, r"\boxed{7}", False),
        ({"boxed": 1.0}, "7", True),
        ({"numeric": 0.0}, "7", True),
    ],
)
def test_weights_are_summed_and_solved_means_right_and_not_well_formed(
    weights: dict[str, float], completion: str, solved: bool
) -> None:
    score = weighted_score(weights, completion, "7")
    assert score.exact is solved
    assert set(score.parts) == set(weights)
    assert score.reward == sum(weight * score.parts[name] for name, weight in weights.items())


def test_weights_that_cannot_be_are_refused_and_none_means_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked_weights({}) == {"exact": 1.0}
    with pytest.raises(UserError, match=r"no reward 'exat'; known rewards: exact, numeric, math, boxed"):
        checked_weights({"exat": 1.0})
    monkeypatch.setattr(rewards, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[tasks\]'"):
        checked_weights({"math": 1.0})


@pytest.mark.parametrize(
    ("completion", "stops", "parts"),
    [
        ("7 END", ("END",), {"exact": 1.0, "boxed": 0.0}),
        ("7\n\nNext", ("\n\n", "Next"), {"exact": 1.0, "boxed": 0.0}),
        ("7 END", (), {"exact": 0.0, "boxed": 0.0}),
        (r"\boxed{7}", ("}",), {"exact": 0.0, "boxed": 1.0}),
    ],
)
def test_exact_reads_up_to_the_stop_string_and_others_with_it(
    completion: str, stops: tuple[str, ...], parts: dict[str, float]
) -> None:
    assert weighted_score({"exact": 1.0, "boxed": 1.0}, completion, "7", stops).parts == parts
    assert weighted_score({"boxed": 1.0}, completion, "7", stops).exact == (parts["exact"] == 1.0)

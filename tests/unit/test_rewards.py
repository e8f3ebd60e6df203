"""Rewards of answers: what counts as the number, the box and the same mathematics."""

from __future__ import annotations

from fractions import Fraction

import pytest

from swarm.errors import UserError
from swarm.tasks import rewards
from swarm.tasks.rewards import boxed, checked_weights, exact, last_box, last_number, math, numeric, weighted_score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", "42"),
        ("so ...42", "42"),
        ("It is -3.", "-3"),
        ("7-4", "4"),
        ("5 - 3", "3"),
        ("x=-5", "-5"),
        ("x = \u22125", "-5"),
        ("+7", "7"),
        ("1,234.5 dollars", "1234.5"),
        ("1{,}234", "1234"),
        ("a, b, 10,20", "20"),
        ("it costs -$5", "-5"),
        (r"\$12", "12"),
        ("50%", "50"),
        (".5", "0.5"),
        ("3.14.15", "3.14"),
        ("1e-3", "0.001"),
        ("1/2", "1/2"),
        ("10 / 4", "5/2"),
        (r"$-\frac{3}{4}$", "-3/4"),
        (r"3\frac{1}{2}", "7/2"),
        (r"\boxed{12}, since 7 is less", "12"),
        (r"\boxed{\frac{1}{3}}", "1/3"),
        (r"\boxed{1} or rather \boxed{2}", "2"),
        (r"\boxed{\text{none}} 7", "7"),
        ("H2O boils at 100 C", "100"),
        ("5+5=10 #### 72", "72"),
    ],
)
def test_the_last_number_is_read(text: str, number: str) -> None:
    assert last_number(text) == Fraction(number)


@pytest.mark.parametrize("text", ["", "none", "v2", "3/0", r"\frac{1}{0}", "9" * 5000, "\u0663"])
def test_no_number_is_read_where_none_is_or_none_can_be(text: str) -> None:
    assert last_number(text) is None


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"\boxed{a \boxed{b}", "b"),
        (r"\boxed{a", None),
        ("} { }", None),
        (r"\fbox {x}", "x"),
        ("", None),
    ],
)
def test_the_last_closed_box_is_found(text: str, content: str | None) -> None:
    assert last_box(text) == content


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (r"\boxed{" * 100_000 + "7", Fraction(7)),
        (r"\boxed{" * 50_000 + "7" + "}" * 50_000 + "8", Fraction(7)),
        ("1," * 200_000, Fraction(1)),
        ("-" * 400_000 + "7", Fraction(-7)),
        ("/ " * 200_000 + "7", Fraction(7)),
    ],
    ids=["open boxes", "nested boxes", "commas", "signs", "slashes"],
)
def test_hostile_text_is_read_as_other_text_is(text: str, number: Fraction) -> None:
    """Quadratic readers would take minutes of it, which the test's own time limit does not give."""
    assert last_number(text) == number


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("42", "42", 1),
        (" 42\n", "42", 1),
        ("<think>41? no</think>\n42", "42", 1),
        ("41?</think>42", "42", 1),
        ("<think>42", "42", 0),
        ("It is 42", "42", 0),
        ("", "", 1),
        ("4 2", "42", 0),
    ],
)
def test_exact_asks_for_the_answer_alone(completion: str, answer: str, right: float) -> None:
    assert exact(completion, answer) == right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("so 1,000 in all", "1000", 1),
        ("0.50", "1/2", 1),
        ("0.33", "1/3", 0),
        ("<think>72</think> 71", "72", 0),
        ("72", "24*3=72 #### 72", 1),
        ("none", "72", 0),
        ("72", "seventy-two", 0),
        ("none", "none", 0),
    ],
)
def test_numeric_compares_the_last_numbers(completion: str, answer: str, right: float) -> None:
    assert numeric(completion, answer) == right


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"hence \boxed{\frac{2}{4}}", "1/2", 1),
        (r"it is $1+x^2$", "x^2+1", 1),
        (r"it is $x^2$", "x^2+1", 0),
        ("no idea", "1/2", 0),
        ("", "1/2", 0),
        (r"<think>$\frac12$</think> 3", r"$\frac{1}{2}$", 0),
        ("$9^{9^{9^9}}$", "7", 0),
    ],
)
def test_math_compares_mathematics(completion: str, answer: str, right: float) -> None:
    assert math(completion, answer) == right


def test_boxed_asks_for_the_form_alone() -> None:
    assert (boxed(r"\boxed{x}", "y"), boxed(r"\boxed{ }", "y"), boxed("x", "x")) == (1.0, 0.0, 0.0)


def test_weights_are_summed_and_the_parts_told_as_they_were() -> None:
    score = weighted_score({"numeric": 2.0, "boxed": -0.5}, r"\boxed{7}", "7")
    assert score.reward == 1.5
    assert score.parts == {"numeric": 1.0, "boxed": 1.0}
    assert score.exact


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
def test_solved_means_right_and_not_well_formed(weights: dict[str, float], completion: str, solved: bool) -> None:
    assert weighted_score(weights, completion, "7").exact is solved


def test_exact_match_is_the_reward_where_none_is_asked_for() -> None:
    assert checked_weights({}) == {"exact": 1.0}


def test_an_unknown_reward_is_refused_with_the_names_of_the_known() -> None:
    with pytest.raises(UserError, match=r"no reward 'exat'; known rewards: exact, numeric, math, boxed"):
        checked_weights({"exat": 1.0})


def test_a_reward_whose_package_is_missing_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "_has_math_verify", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'echo-node\[tasks\]'"):
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

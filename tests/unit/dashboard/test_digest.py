"""What the page and its public part show: what the terminal says, bounded, and JSON whatever a status holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.dashboard.digest import COLUMNS, MAX_LINKS, digest
from swarm.dashboard.public import PublicState, public_state
from swarm.extras import installs
from swarm.report.figures import read_figures
from swarm.report.terminal import figures as terminal_figures
from swarm.report.terminal import live_view
from tests.unit.report.test_terminal import printed
from tests.unit.report.test_words import RECORDED

RECORD: dict[str, Any] = json.loads(RECORDED.read_text())


def page(status: dict[str, Any], *, now: float = 0.0, live: bool = True, **config: Any) -> dict[str, Any]:
    return digest(status, config, began=1000.0, now=now, live=live)


CONFIG: dict[str, Any] = {"model": "tiny", "task": "digits", "beat_s": 1.0, "target": 0.9}


def test_the_page_has_what_its_status_has() -> None:
    shown = page(RECORD, now=1060.0, **CONFIG)
    assert (shown["model"], shown["task"], shown["target"]) == ("tiny", "digits", 0.9)
    assert (shown["began"], shown["at"]) == (1000.0, 1060.0)
    same = ("step", "steps", "version", "links")
    assert {name: shown[name] for name in same} == {name: RECORD[name] for name in same}
    assert shown["join"].startswith("echo-node join --role sampler --bootstrap 127.0.0.1:")
    assert shown["time_left_s"] == pytest.approx((RECORD["steps"] - RECORD["step"]) * RECORD["step_s"])
    assert shown["staleness"] == {"bound": 2, "counts": RECORD["ages"]}
    newest = shown["versions"][-1]
    assert (newest["version"], newest["of"]) == (list(RECORD["broadcasts"])[-1], 3)
    sizes, times = {"raw_bytes", "encoded_bytes", "sent_bytes"}, {"stage_s", "prepared_s", "installed_s"}
    assert newest.keys() >= {"codecs", *sizes, *times}


def test_tiles_say_what_the_terminal_says() -> None:
    known = dict(terminal_figures(RECORD))
    assert page(RECORD)["bottleneck"] in printed(live_view(RECORD, [], 200, "echo-node lead"), width=200)
    tiles = {tile["id"]: tile for tile in page(RECORD)["tiles"]}
    assert list(tiles) == [
        *("reward", "held_out", "rollouts_per_s", "tokens_per_s", "busy", "staleness", "discarded", "broadcast"),
        *("samplers", "cost"),
    ]
    assert tiles["reward"]["text"] == known["reward"]
    assert tiles["reward"]["value"] == RECORD["metrics"]["reward"]
    assert tiles["rollouts_per_s"]["text"] == known["of all nodes"]
    assert f"{tiles['staleness']['text']}, {tiles['staleness']['details'][0][1]}" == known["staleness"]
    assert tiles["broadcast"]["text"] == known["time to install"]
    assert [name for name, _ in tiles["broadcast"]["details"]] == ["staging", "preparing", "sending", "installing"]
    assert tiles["busy"]["value"] == pytest.approx(1 - RECORD["capacity"]["idle_share"])
    lost = {**RECORD, "verdicts": {"accepted": 10, "stale": 3}, "rollouts_dropped": {"bound_lowered": 4}}
    assert (tiles["cost"]["text"], tiles["cost"]["value"]) == ("no price set", None)
    discarded = next(tile for tile in page(lost)["tiles"] if tile["id"] == "discarded")
    assert discarded["value"] == 7
    assert discarded["details"] == [["refused", "3 stale"], ["dropped", "4 bound_lowered"]]


def test_tiles_say_what_the_report_s_last_step_says(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**RECORD["metrics"], "time": 1000.0}) + "\n")
    found = read_figures(tmp_path)
    tiles = {tile["id"]: tile for tile in page(RECORD)["tiles"]}
    for name in ("reward", "staleness"):
        assert tiles[name]["value"] == found.last(tiles[name]["series"])
    assert {tile["series"] for tile in tiles.values()} - {None, "exact_match"} <= found.columns.keys()


def test_an_alarm_is_told_with_its_step_and_is_no_news_for_ever() -> None:
    alarm = {"step": RECORD["step"] - 3, "text": "the gradient is far larger"}
    said = page({**RECORD, "alarm": alarm})["alarm"]
    assert said == f"step {alarm['step']}: the gradient is far larger"
    assert page({**RECORD, "alarm": {**alarm, "step": RECORD["step"] - 51}})["alarm"] == ""


def test_of_a_run_that_is_over_nobody_is_there_any_more() -> None:
    over = {**RECORD, "state": "finished", "step": 60, "held_out": [{"version": 60, "exact_match": 0.91}]}
    shown = page(over, live=False, **CONFIG, steps=200)
    assert shown["bottleneck"] == "ended at step 60 of 200: the target of 0.9 was reached"
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in shown["nodes"]["rows"]]
    assert len(rows) == 4
    assert {row["state"] for row in rows[1:]} == {"gone"}
    assert {row[rate] for row in rows for rate in ("tokens_per_s", "up_bytes_per_s", "last_seen_s")} == {None}
    assert rows[1]["accepted"] > 0
    assert shown["links"] == []
    ends: list[tuple[dict[str, Any], str]] = [
        ({"stopped_by": "the loss is not finite"}, "ended by an alarm at step 60 of 200: the loss is not finite"),
        ({"cost": {"cost_total": 7.0}}, "ended at step 60 of 200: the budget of 7 is spent"),
        ({"step": 200}, "ended after its last step"),
        ({"state": "stopped"}, "ended at step 60 of 200"),
        ({"state": "going on, or killed"}, "its files end at step 60 of 200: it goes on elsewhere, or was killed"),
    ]
    for way, words in ends:
        shown = page({**RECORD, "step": 60, **way}, live=False, steps=200, max_cost=7.0)
        assert shown["bottleneck"] == words


def test_a_node_s_row_has_what_the_learner_knows_of_it() -> None:
    late = {**RECORD["samplers"][1], "silent_s": 2.5, "nickname": "bob", "verdicts": {"stale": 2, "malformed": 1}}
    samplers = [RECORD["samplers"][0], late]
    rows = page({**RECORD, "samplers": samplers, "publics": []}, **CONFIG)["nodes"]["rows"]
    learner, first, second = (dict(zip(COLUMNS, row, strict=True)) for row in rows)
    assert (learner["role"], learner["name"], learner["version"]) == ("learner", RECORD["node"][:12], RECORD["version"])
    assert (first["state"], second["state"], second["name"]) == ("active", "silent", "bob")
    assert (second["stale"], second["invalid"], second["last_seen_s"]) == (2, 1, 2.5)
    assert first["up_bytes_per_s"] is not None


@pytest.mark.parametrize("state", ["paused", "finishing", "starting"])
def test_no_time_left_is_told_of_a_run_that_stands_still(state: str) -> None:
    assert page({**RECORD, "state": state})["time_left_s"] is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\x1b[2J\u202e" * 300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, one in inner for found in _paths(one, (*path, key)))]


PATHS = [path for path in _paths(RECORD) if path]


@given(
    st.lists(st.tuples(st.sampled_from(PATHS), ANYTHING), max_size=6),
    st.dictionaries(st.sampled_from(("model", "task", "target", "beat_s")), ANYTHING),
)
@settings(max_examples=40, deadline=None)
def test_any_status_gives_bounded_json(changes: list[tuple[tuple[Any, ...], Any]], config: dict[str, Any]) -> None:
    status = json.loads(RECORDED.read_text())
    for (*way, last), value in changes:
        place = status
        for key in way:
            place = place[key] if isinstance(place, dict | list) and _has(place, key) else {}
        if isinstance(place, dict) or _has(place, last):
            place[last] = value
    for shown in (page(status, **config), public_state(status, config)):
        again = json.loads(json.dumps(shown, allow_nan=False))
        assert again.keys() == shown.keys()
        assert all(len(text) <= 4096 and text.isprintable() for text in _texts(again))


def _has(place: Any, key: Any) -> bool:
    return key in place if isinstance(place, dict) else isinstance(key, int) and key < len(place)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for one in inner for text in _texts(one)]


def test_a_swarm_of_any_size_is_bounded() -> None:
    many = [["a" * 32, f"{at:032x}", 1, "0.3"] for at in range(3 * MAX_LINKS)]
    shown = page({**RECORD, "links": many, "samplers": RECORD["samplers"] * 3000})
    assert len(shown["links"]) == MAX_LINKS
    assert len(shown["nodes"]["rows"]) == 4096


def test_the_public_page_shows_nothing_private(tmp_path: Path) -> None:
    private = tmp_path / "models" / "secret-lab"
    private.mkdir(parents=True)
    config = {**CONFIG, "model": str(private), "task": f"examples:{private}/data.jsonl", "run_dir": str(tmp_path)}
    shown = public_state({**RECORD, "run_dir": str(tmp_path)}, config)
    assert (shown["model"], shown["task"]) == ("secret-lab", "examples:data.jsonl")
    assert shown["run"] == "secret-lab on examples:data.jsonl"
    assert shown["what"] == 'this swarm trains "secret-lab" on the task "examples:data.jsonl"'
    assert public_state(RECORD, config | {"about": "for all"})["what"].endswith('; its owner says: "for all"')
    assert shown["installs"] == installs()
    text = json.dumps(shown)
    assert str(tmp_path) not in text
    others = [url for sampler in RECORD["publics"] for url in [sampler["address"]]]
    assert others
    assert not any(url.rpartition("/")[2] in text for url in others)


def test_who_gave_most_comes_first_under_the_chosen_name() -> None:
    leaders = [["a" * 32, "bob\x1b[2J", 5, 900], ["b" * 32, "", 7, 800], ["c" * 32, "liar", 9, 700], ["odd"], None]
    shown = public_state({**RECORD, "leaders": leaders, "barred": ["c" * 32]}, CONFIG)
    assert shown["leaders"] == [
        {"name": "bob?[2J", "rollouts": 5, "tokens": 900},
        {"name": "b" * 12, "rollouts": 7, "tokens": 800},
    ]


def test_the_public_state_is_made_once_a_second_however_many_ask() -> None:
    now, asked = [0.0], [0]

    def status() -> dict[str, Any]:
        asked[0] += 1
        return RECORD

    public = PublicState(status, CONFIG, clock=lambda: now[0])
    bodies = {public.body() for _ in range(50)}
    assert (len(bodies), asked[0]) == (1, 1)
    now[0] = 1.0
    assert json.loads(public.body())["step"] == RECORD["step"]
    assert asked[0] == 2

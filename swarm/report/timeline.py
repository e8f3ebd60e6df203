"""A picture of a simulated swarm over time. Needs matplotlib (the extra `plot`), which nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.errors import UserError
from swarm.simulate.timeline import Mark, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOUR_S = 3600.0

BUSY, IDLE, INK, SOFT = "#2a9d6f", "#d1495b", "#1f2d3d", "#9aa5b1"
BLUE, LIGHT, GOLD, PURPLE = "#2f6db5", "#dfe6ee", "#d08c1f", "#7a5195"

SIZE_INCHES, DOTS_PER_INCH = (11.0, 10.2), 150

HEIGHTS = (0.7, 2.2, 1.1, 1.7, 1.9)  # Of the five panels, from the learner to the costs
CROWD = 0.6  # Where fewer than this share of those that are there hold weights, the panel is cut above those that do
ENDINGS = (".png", ".svg", ".pdf")


def check_plot(file: Path) -> None:
    """UserError if the picture could not be drawn: before the run, which takes minutes."""
    if file.suffix not in ENDINGS:
        raise UserError(f"--plot {file}: name a file that ends with {', '.join(ENDINGS)}")
    if not file.parent.is_dir():
        raise UserError(f"--plot {file}: there is no directory {file.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError("--plot needs matplotlib: pip install 'echo-node[plot]'") from error


def draw_timeline(
    timeline: Timeline, file: Path, *, title: str, subtitle: str, hours: float, bound: int, currency: str
) -> None:
    """Write the picture to a file that `check_plot` found good."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, dpi=DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    panels: list[Any] = list(
        figure.subplots(len(HEIGHTS), 1, sharex=True, gridspec_kw={"height_ratios": HEIGHTS, "hspace": 0.3})
    )
    _learner(panels[0], timeline, hours)
    _samplers(panels[1], timeline)
    _versions(panels[2], timeline)
    _staleness(panels[3], timeline, bound)
    _cost(panels[4], timeline, currency)
    for panel in panels:
        _dress(panel, timeline.marks)
    _name_marks(panels[1], timeline.marks)
    panels[-1].set_xlim(0, hours)
    panels[-1].set_xlabel("hours", color=INK)
    figure.text(0.075, 0.965, title, fontsize=15, fontweight="bold", color=INK)
    figure.text(0.075, 0.94, subtitle, fontsize=10, color=SOFT)
    figure.subplots_adjust(left=0.075, right=0.84, top=0.905, bottom=0.055)
    try:
        figure.savefig(file)
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}") from error


def _learner(panel: Axes, timeline: Timeline, hours: float) -> None:
    """Busy, with what it waited for batches cut out. It trains until it begins to wait for the next batch."""
    panel.broken_barh([(0, hours)], (0, 1), facecolors=BUSY)
    waits = [((step.at_s - step.waited_s) / HOUR_S, step.waited_s / HOUR_S) for step in timeline.steps]
    if timeline.waiting_since_s is not None:
        since = timeline.waiting_since_s / HOUR_S
        waits.append((since, hours - since))
    panel.broken_barh([wait for wait in waits if wait[1] > 0], (0, 1), facecolors=IDLE)
    panel.set_yticks([])
    panel.set_ylim(0, 1)
    _title(panel, "Learner")
    _legend(panel, [("training", BUSY), ("waiting", IDLE)])


def _samplers(panel: Axes, timeline: Timeline) -> None:
    at = [moment.at_s / HOUR_S for moment in timeline.moments]
    there = [moment.there for moment in timeline.moments]
    ready = [moment.ready for moment in timeline.moments]
    active = [moment.active for moment in timeline.moments]
    used = [moment.active * moment.used_share for moment in timeline.moments]
    panel.fill_between(at, there, step="post", color=LIGHT, linewidth=0)
    panel.step(at, ready, where="post", color=SOFT, linewidth=1.2)
    panel.fill_between(at, used, step="post", color=BLUE, alpha=0.25, linewidth=0)
    panel.step(at, active, where="post", color=BLUE, linewidth=1.8)
    top: float = max([1, *there])
    if max([*ready, *active]) < CROWD * top:
        # The market is shown by its edge at most: what the learner uses of it would be a line at the bottom.
        top = 1.2 * max([1, *ready, *active])
    panel.set_ylim(0, 1.1 * top)
    _title(panel, f"Samplers ({min(there):,} to {max(there):,} there or on offer)")
    _legend(
        panel,
        [("there, or on offer", LIGHT), ("with weights", SOFT), ("active", BLUE), ("their places in use", "#cbdaec")],
    )


def _versions(panel: Axes, timeline: Timeline) -> None:
    """A bar as wide as a version was on its way, and as high; bars that overlap are darker."""
    took = [one.to_s - one.from_s for one in timeline.versions]
    panel.bar(
        [one.from_s / HOUR_S for one in timeline.versions],
        took,
        width=[seconds / HOUR_S for seconds in took],
        align="edge",
        color=PURPLE,
        edgecolor=PURPLE,
        linewidth=0.6,
        alpha=0.55,
    )
    panel.set_ylim(0, 1.15 * max([1.0, *took]))
    _title(panel, "Versions on their way, seconds to the last active sampler")


def _staleness(panel: Axes, timeline: Timeline, bound: int) -> None:
    at = [step.at_s / HOUR_S for step in timeline.steps]
    panel.axhline(bound, color=IDLE, linewidth=1, linestyle=(0, (4, 3)))
    panel.step(at, [step.max_staleness for step in timeline.steps], where="post", color=SOFT, linewidth=1.2)
    panel.step(at, [step.mean_staleness for step in timeline.steps], where="post", color=BLUE, linewidth=1.8)
    panel.set_ylim(0, bound + 0.7)
    panel.locator_params(axis="y", integer=True)
    _title(panel, "Staleness of batches, in steps")
    _legend(panel, [(f"bound S = {bound}", IDLE), ("oldest of a batch", SOFT), ("mean", BLUE)])


def _cost(panel: Axes, timeline: Timeline, currency: str) -> None:
    """The rate of spending without traffic, and what was spent between two batches."""
    at = [moment.at_s / HOUR_S for moment in timeline.moments]
    rate = [moment.cost_per_hour for moment in timeline.moments]
    panel.fill_between(at, rate, step="post", color=GOLD, alpha=0.22, linewidth=0)
    panel.step(at, rate, where="post", color=GOLD, linewidth=1.6)
    panel.set_ylim(0, 1.15 * max([1.0, *rate]))
    _title(panel, f"Cost, {currency}")
    steps = timeline.steps[1:]
    other = panel.twinx()
    other.plot(
        [step.at_s / HOUR_S for step in steps], [step.cost for step in steps], ".", color=INK, markersize=4, alpha=0.8
    )
    other.set_ylim(0, 1.6 * max(_middle([step.cost for step in steps]), default=1.0))
    for side in ("top", "left", "bottom"):
        other.spines[side].set_visible(False)
    other.spines["right"].set_color(SOFT)
    other.tick_params(colors=INK, labelsize=9)
    _legend(panel, [("per hour (left)", GOLD), ("per step (right)", INK)], clear=0.045)


def _middle(values: Sequence[float]) -> list[float]:
    """Without the largest twentieth: the first step pays for the start of the whole fleet."""
    return sorted(values)[: -(-len(values) * 19 // 20)]


def _title(panel: Axes, text: str) -> None:
    panel.set_title(text, loc="left", fontsize=10.5, color=INK, fontweight="bold", pad=5)


def _legend(panel: Axes, entries: Sequence[tuple[str, str]], clear: float = 0.0) -> None:
    """Beside the panel, so that it hides nothing."""
    from matplotlib.patches import Patch

    panel.legend(
        handles=[Patch(color=color, label=label) for label, color in entries],
        loc="upper left",
        bbox_to_anchor=(1.005 + clear, 1.05),
        fontsize=8.5,
        frameon=False,
        labelcolor=INK,
        handlelength=0.9,
        handleheight=0.9,
    )


def _dress(panel: Axes, marks: Sequence[Mark]) -> None:
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(SOFT)
    panel.tick_params(colors=INK, labelsize=9)
    panel.grid(axis="y", color=LIGHT, linewidth=0.7)
    panel.set_axisbelow(True)
    for mark in marks:
        panel.axvline(mark.at_s / HOUR_S, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))


def _name_marks(panel: Axes, marks: Sequence[Mark]) -> None:
    for mark in marks:
        panel.annotate(
            mark.text,
            (mark.at_s / HOUR_S, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(5, -4),
            textcoords="offset points",
            fontsize=8.5,
            color=INK,
            verticalalignment="top",
        )

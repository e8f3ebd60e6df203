"""`/metrics`: a node's status in the words of Prometheus. It says nothing that `/v1/status` does not say.

EVERY, LEARNER and JOINED list all of it, and docs/metrics.md shows them. What a status does not have yet is
left out. Label values come from sets of our own: a word that is in none counts as `other`, so strangers add no series,
whatever they send.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from aiohttp import web

from swarm.learner.messages import AlarmKind
from swarm.net.client import METRICS_PATH
from swarm.pay.model import Binds
from swarm.rollout.journal.entries import NO_VARIANCE
from swarm.sampler.engine import EngineKind
from swarm.types import Verdict

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX, OTHER = "echo_node_", "other"

DROPS = ("stale", "bound_lowered", NO_VARIANCE, "environment_failed", "generation_failed")
REFUSALS = (  # What people ask about; those of gossip are `other`
    *("connections", "all_connections", "connections_of_node", "requests", "handshake", "malformed", "too_slow"),
    *("too_large", "other_protocol", "unsigned", "bad_signature", "unknown_session", "stream", "dial_back"),
    *("encodings", "plain_http"),
)
STATES = (
    *("starting", "looking_for_the_swarm", "looking_for_the_learner", "syncing", "sampling", "waiting", "standby"),
    *("relaying", "running", "paused", "stopping", "leaving", "finishing", "finished"),
)
WORK, BEHIND = ("active", "standby", "fetching", "refused"), ("0", "1", "2", "3_or_more")


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric. `place` says where it is in a status, with dots between keys. With a label it is a number for each of
    `values`, or one of them. A name that ends in `_total` is a counter, which begins with the process and only rises;
    any other may fall."""

    name: str
    help: str
    place: str
    label: str = ""
    values: tuple[str, ...] = ()

    def samples(self, status: Mapping[str, Any]) -> dict[str, float]:
        """Return the value for each value of the label ("" without one); nothing if `status` does not have it."""
        found: Any = status
        for key in self.place.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        if not self.label:
            return {"": float(found)} if isinstance(found, int | float) else {}
        counts = dict.fromkeys((*self.values, OTHER), 0.0) if found is not None else {}
        for word, value in ({found: 1} if isinstance(found, str) else found or {}).items():
            counts[word if word in counts else OTHER] += value
        return counts


EVERY = (
    Figure("state", "1 for what the node does now.", "said.state", "state", STATES),
    Figure("requests_refused_total", "Connections and requests that it refused.", "refused", "reason", REFUSALS),
    Figure("weights_sent_bytes_total", "Weights that it sent to others.", "sent_bytes"),
    Figure("weights_received_bytes_total", "Weights that it received.", "received_bytes"),
    Figure("streams", "Its connections for weights.", "streams"),
)
LEARNER = (
    Figure("fault", "1 while something is wrong with the run's files, such as a full disk.", "said.fault"),
    Figure("step", "Learner steps taken.", "step"),
    Figure("steps_planned", "Learner steps at which the run ends.", "steps"),
    Figure("version_published", "Newest version that was published.", "said.version"),
    Figure("versions_published_total", "Versions published.", "versions_published"),
    # How it learns: of the last step.
    Figure("reward_mean", "Mean reward.", "metrics.reward"),
    Figure("reward_std", "Mean standard deviation of the rewards within a group.", "metrics.reward_std"),
    Figure("held_out_ratio", "Share of exact answers to held-out prompts.", "said.held_out.exact_match"),
    Figure("groups_equal_ratio", "Share of groups whose rewards are all equal.", "metrics.frac_reward_zero_std"),
    Figure("entropy", "Entropy of the policy, in nats a token.", "metrics.entropy"),
    Figure("mismatch_kl", "Distance of the engines' log-probs from the learner's.", "metrics.mismatch_kl"),
    Figure("gradient_norm", "Norm of the gradient.", "metrics.grad_norm"),
    Figure("clipped_low_ratio", "Share of tokens that the clip holds below.", "metrics.clip_ratio/low_mean"),
    Figure("clipped_high_ratio", "Share of tokens that the clip holds above.", "metrics.clip_ratio/high_mean"),
    Figure("completion_tokens_mean", "Mean length of a completion.", "metrics.completions/mean_length"),
    Figure("episode_turns_mean", "Mean turns of an episode.", "metrics.episode/turns/mean"),
    Figure("episode_limit_ratio", "Share of episodes that reached a limit.", "metrics.episode/limit_share"),
    Figure("alarms_total", "Alarms of learning.", "alarms", "alarm", get_args(AlarmKind)),
    # What it waits for.
    Figure("idle_ratio", "Share of its time in which it waits for rollouts.", "capacity.idle_share"),
    Figure("bottleneck", "1 for what limits the run.", "capacity.binds", "by", get_args(Binds)),
    Figure("staleness_mean_steps", "Mean staleness of the last step.", "metrics.staleness/mean"),
    Figure("staleness_max_steps", "Highest staleness in the last step.", "metrics.staleness/max"),
    Figure("staleness_bound_steps", "The bound S.", "max_staleness"),
    Figure("train_step_seconds", "Time of the last step in the trainer.", "metrics.train_step_s"),
    Figure("step_seconds", "Time from step to step, the median of the last nine.", "step_s"),
    Figure("stage_seconds", "Time for which the newest version held the trainer up.", "metrics.stage_s"),
    Figure("prepare_seconds", "Time from staged weights to their publication.", "metrics.prepared_s"),
    Figure("broadcast_seconds", "Time from publication until all samplers held a version.", "broadcast_s"),
    Figure("version_raw_bytes", "Size of the newest version.", "said.broadcast.raw_bytes"),
    Figure("version_encoded_bytes", "The same, encoded.", "said.broadcast.encoded_bytes"),
    # The swarm.
    Figure("samplers", "Samplers by what they do.", "said.work", "state", WORK),
    Figure("samplers_behind", "Samplers by how many versions they lack.", "said.behind", "versions", BEHIND),
    Figure("samplers_engines", "Samplers by engine.", "said.engines", "engine", get_args(EngineKind)),
    Figure("rollouts_judged_total", "Rollouts handed in.", "verdicts", "verdict", get_args(Verdict)),
    Figure("rollouts_dropped_total", "Accepted and not trained on.", "rollouts_dropped", "reason", DROPS),
    Figure("rollouts_withheld_total", "Not trained on because of their claims.", "said.withheld"),
    Figure("tokens_accepted_total", "Tokens of accepted rollouts.", "cost.tokens_accepted_here"),
    # Money, in the swarm's one currency, over all lives of the run.
    Figure("cost", "What the run has cost.", "cost.cost_total"),
    Figure("cost_limit", "What it may cost.", "cost.max_cost"),
    Figure("cost_per_hour", "What the learner and the active samplers cost an hour.", "cost.cost_per_hour"),
    Figure("cost_per_token", "What an accepted token has cost.", "cost.cost_per_token"),
)
JOINED = (
    Figure("version_held", "Version of the weights here.", "said.map"),
    Figure("version_installed", "Version that the engine has.", "said.installed"),
    Figure("fetched_ratio", "Share of the version under way that is here.", "syncing.share"),
    Figure("chunks_rejected_total", "Wrong chunks.", "chunks_rejected", "reason", ("table", "shape", "digest")),
    Figure("own_rollouts_total", "Rollouts that it handed in.", "verdicts", "verdict", get_args(Verdict)),
    Figure("own_rollouts_dropped", "Accepted and not trained on, as the learner says.", "dropped", "reason", DROPS),
    Figure("own_tokens_accepted_total", "Tokens of its accepted rollouts.", "accepted_tokens"),
    Figure("own_rollouts_per_second", "Rollouts that the engine draws.", "rollouts_per_s"),
)


def said(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a status says in other words than Prometheus needs: texts, versions, a row for each sampler."""
    # "paused: outside its hours", "paused by its owner", "waiting (paced)": the rest is for people.
    words = str(status["state"]).partition(":")[0].partition(" (")[0].partition(" by ")[0].replace(" ", "_")
    versions = {key: _number(status.get(key)) for key in ("version", "map", "installed")}
    rows, newest = status.get("samplers", ()), versions["version"]
    lacks = [newest - held for one in rows if newest is not None and (held := _number(one["installed"])) is not None]
    return versions | {
        "state": words,
        "fault": bool(status.get("fault")),
        "held_out": next(reversed(status.get("held_out", ())), None),
        "broadcast": next(reversed(status.get("broadcasts", {}).values()), None),
        "work": Counter(map(_work, rows)),
        "behind": Counter(BEHIND[max(0, min(lack, len(BEHIND) - 1))] for lack in lacks),
        "engines": Counter(one["engine"].partition("/")[0] for one in rows),
        "withheld": sum(status.get("rollouts_withheld", {}).values()),
    }


def _work(sampler: Mapping[str, Any]) -> str:
    if sampler["barred"]:
        return "refused"
    return "standby" if sampler["standby"] else "active" if sampler["installed"] else "fetching"


def _number(version: str | None) -> int | None:
    return int(version.rpartition(".")[2]) if version else None


def metrics_route(status: Callable[[], Mapping[str, Any]]) -> web.RouteDef:
    """Answer `GET /metrics`, once for each object that `status` returns."""
    # Here, since it takes a tenth of a second, and not every command that imports this module is a node.
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collector:
        def collect(self) -> Iterator[Metric]:
            now = status()
            now = {**now, "said": said(now)}
            for figure in EVERY + (LEARNER if now["role"] == "learner" else JOINED):
                kind = CounterMetricFamily if figure.name.endswith("_total") else GaugeMetricFamily
                metric = kind(PREFIX + figure.name, figure.help, labels=[figure.label] if figure.label else [])
                for word, value in figure.samples(now).items():
                    metric.add_metric([word] if figure.label else [], value)
                if metric.samples:
                    yield metric

    shown, body = None, b""

    async def answer(request: web.Request) -> web.Response:
        nonlocal shown, body
        if shown is not (now := status()):
            shown, body = now, generate_latest(registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    registry = CollectorRegistry()
    registry.register(Collector())
    return web.get(METRICS_PATH, answer)

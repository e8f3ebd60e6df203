"""The verdict on an answer: first its tokens, then its lease and group, then its versions and the bound."""

from __future__ import annotations

import math
from array import array

from swarm.rollout.messages import Answer
from swarm.rollout.plane.begun import handing_fault
from swarm.rollout.plane.episodes import MAX_SPANS
from swarm.rollout.plane.groups import Group, Sample
from swarm.rollout.plane.rules import is_fresh, staleness
from swarm.types import NodeId, Rollout, Verdict, VersionId

MIN_LOGPROB = -1e4  # A lower log-prob is a mistake; the objective limits the effect of higher ones
LOGPROB_SLACK = 1e-3  # A log-prob may exceed 0 by the rounding of a bf16 softmax


def verdict_on(
    answer: Answer,
    node: NodeId,
    group: Group | None,
    *,
    fault: str,
    newest: VersionId,
    next_batch: int,
    max_staleness: int,
) -> tuple[Verdict, str]:
    """Return the verdict on an answer of `node`, and a line for its sampler. `fault` says what is malformed about its
    tokens ("" if nothing). `group` is its group if it is open."""
    rollout = answer.rollout
    if fault:
        return "malformed", fault
    if group is None:
        return "duplicate", "this group is closed"
    if rollout.index >= len(group.samples):
        return "malformed", "this group has no such sample"
    sample = group.samples[rollout.index]
    if sample.rollout is not None:
        return "duplicate", "this sample is answered"
    if answer.attempt > sample.leased_to.get(node, -1):
        return "malformed", "this sample was not leased to this node"
    if sample.episode is not None and (answer.attempt < sample.episode.attempt or answer.turn > sample.turn):
        return "stale", "this episode has begun again"
    if answer.turn != sample.turn:
        return "duplicate", "this turn is drawn"
    if sample.episode is not None and sample.episode.thinking:
        return "malformed", "its environment has not answered yet"
    if fault := _rules_fault(rollout, group, sample):
        return "malformed", fault
    if rollout.finish in ("failed", "handed") and (sample.node != node or not is_current(answer, group)):
        return "duplicate", "this failure is known, or this node does not hold the sample any more"
    oldest = rollout.oldest
    if any(span.version > newest or span.version.version > newest.version for span in rollout.spans):
        return "future", f"version {newest} is the newest"
    if group.purpose == "train" and oldest is not None and not is_fresh(oldest, next_batch, max_staleness):
        late = staleness(oldest, next_batch) - max_staleness
        return "stale", f"version {oldest} is {late} step(s) past the bound of {max_staleness}"
    return "accepted", ""


def is_current(answer: Answer, group: Group) -> bool:
    """Return whether the sample has not failed since it was leased for this answer, and waits for this turn. An answer
    that comes twice must not touch the next attempt."""
    index = answer.rollout.index
    if index >= len(group.samples):
        return False
    return (answer.turn, answer.attempt) == (group.samples[index].turn, group.samples[index].attempt)


def token_fault(rollout: Rollout, vocab_size: int) -> str:
    """Return what is wrong with the tokens of a rollout, whatever it answers; "" if nothing is."""
    if rollout.finish == "failed":
        return "" if not (rollout.token_ids or rollout.spans) else "a failed generation carries no tokens"
    if rollout.turns or rollout.seats or any(span.node for span in rollout.spans):
        return "an answer is drawn in one go"
    length, ragged = divmod(len(rollout.token_ids), 4)
    if ragged or length == 0:
        return f"{len(rollout.token_ids)} bytes are no token ids"
    if len(rollout.logprobs) != 4 * length:
        return "token ids and log-probs differ in length"
    tokens = rollout.tokens()
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return f"token ids outside the vocabulary of {vocab_size}"
    return _logprob_fault(rollout.logprobs)


def _rules_fault(drawn: Rollout, group: Group, sample: Sample) -> str:
    """Return in what a completion, or a turn of an episode, breaks the rules of its group."""
    if drawn.finish == "failed":
        return ""
    rules, most = group.rules, group.rules.max_new_tokens
    if group.episodes is not None and sample.episode is not None:
        rules = sample.episode.said.limits.on(rules)
        most = min(rules.max_new_tokens, sample.episode.tokens_left(group.episodes))
    if sample.begun is not None:
        most -= sample.begun.length
        if len(sample.begun.spans) + len(drawn.spans) > MAX_SPANS:
            return "more versions than a rollout takes"
    if drawn.finish == "handed":
        if sample.episode is not None or drawn.length >= most:
            return "a turn, or all of a completion, is handed over"
        if fault := handing_fault(drawn, sample.begun, rules.stop_token_ids):
            return fault
    if drawn.length > most:
        return f"{drawn.length} tokens are more than the lease's {most}"
    # With stop strings, any token may have completed one. Checking texts is left to rewards.
    is_stop = int.from_bytes(drawn.token_ids[-4:], "little") in rules.stop_token_ids
    if drawn.finish == "stop" and not is_stop and not rules.stop:
        return "finished by a stop token that is not there"
    if drawn.finish == "length" and drawn.length != most:
        return "finished by length before the length was reached"
    return _span_fault(drawn, group.min_version)


def _logprob_fault(data: bytes) -> str:
    values = array("f", data)
    if not math.isfinite(sum(values)) or min(values) < MIN_LOGPROB or max(values) > LOGPROB_SLACK:
        return "log-probs must be finite and at most 0"
    return ""


def _span_fault(rollout: Rollout, min_version: VersionId) -> str:
    at, before = 0, None
    for span in rollout.spans:
        if span.start != at or span.end <= span.start:
            return "version spans must cover the tokens without gaps"
        if span.version < min_version:
            return f"version {span.version} is below the lease's {min_version}"
        if before is not None and span.version <= before:
            return "version spans must rise"
        at, before = span.end, span.version
    return "" if at == rollout.length else "version spans must cover the tokens without gaps"

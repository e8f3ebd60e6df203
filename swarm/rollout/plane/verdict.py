"""The verdict on an answer: first its shape, then its lease and group, then its versions and the bound."""

from __future__ import annotations

import math
from array import array

from msgspec.structs import replace

from swarm.rollout.plane.episodes import Episode, part_of
from swarm.rollout.plane.leases import Group, Sample, seat_seed
from swarm.rollout.plane.rules import is_fresh, staleness
from swarm.types import Lease, NodeId, Rollout, Verdict, VersionId

MIN_LOGPROB = -1e4  # A lower log-prob is a mistake; the objective limits the effect of higher ones
AGAIN = "this episode has begun again"
LOGPROB_SLACK = 1e-3  # A log-prob may exceed 0 by the rounding of a bf16 softmax


def verdict_on(
    rollout: Rollout,
    lease: Lease,
    node: NodeId,
    group: Group | None,
    *,
    fault: str,
    opened: int,
    newest: VersionId,
    next_batch: int,
    max_staleness: int,
) -> tuple[Verdict, str]:
    """Return the verdict on `rollout` by `node`, and a line for its sampler. The caller has checked the lease's seal.
    `fault` says what is malformed about it ("" if nothing). `group` is the rollout's group if it is open. `opened` is
    the number of the next training group."""
    if fault:
        return "malformed", fault
    if group is None:
        known = lease.purpose != "train" or int(lease.group_id.removeprefix("t")) < opened
        return ("duplicate", "this group is closed") if known else ("stale", "this learner forgot the group")
    if lease.min_version != group.min_version:
        return "stale", "this lease is of an earlier run of this learner"
    sample = group.samples[rollout.index]
    if sample.rollout is not None:
        return "duplicate", "this sample is answered"
    if lease.turn < sample.turn:
        return "duplicate", "this turn is drawn"
    if lease.turn > sample.turn:
        return "stale", AGAIN
    if rollout.finish == "failed" and (sample.node != node or not is_current(lease, rollout, group)):
        return "duplicate", "this failure is known, or this node does not hold the sample any more"
    oldest = rollout.oldest
    if any(span.version > newest or span.version.version > newest.version for span in rollout.spans):
        return "future", f"version {newest} is the newest"
    if lease.purpose == "train" and oldest is not None and not is_fresh(oldest, next_batch, max_staleness):
        late = staleness(oldest, next_batch) - max_staleness
        return "stale", f"version {oldest} is {late} step(s) past the bound of {max_staleness}"
    # Last, since it compares a prompt, which may be long.
    if sample.episode and not _is_next(lease, sample, sample.episode, group):
        return "stale", AGAIN
    return "accepted", ""


def _is_next(lease: Lease, sample: Sample, episode: Episode, group: Group) -> bool:
    """Return whether `lease` is for the next turn of this attempt. One that was given up may have read the same from
    another seed; before it has begun the lease says the seed."""
    is_seed = not episode.begun or lease.samples[0].seed == seat_seed(sample.spec.seed, episode.seat)
    return is_seed and lease.prompt_token_ids == episode.reads(group.prompt.token_ids)


def is_current(lease: Lease, rollout: Rollout, group: Group) -> bool:
    """Return whether the sample has not failed since this lease was given, and waits for this turn. An answer that
    comes twice must not touch the next attempt."""
    sample = group.samples[rollout.index]
    if lease.turn != sample.turn:
        return False
    return any(spec.index == rollout.index and spec.attempt == sample.failures for spec in lease.samples)


def malformation(rollout: Rollout, lease: Lease, *, vocab_size: int) -> str:
    """Return what is wrong with the shape of the rollout; "" if nothing is."""
    if rollout.group_id != lease.group_id or all(s.index != rollout.index for s in lease.samples):
        return "this sample is not in the lease"
    if rollout.finish == "failed":
        return "" if not (rollout.token_ids or rollout.spans) else "a failed generation carries no tokens"
    if rollout.turns or rollout.seats or lease.play:
        return _episode_fault(rollout, lease, vocab_size)
    length, ragged = divmod(len(rollout.token_ids), 4)
    if ragged or length == 0 or length > lease.rules.max_new_tokens:
        return f"{len(rollout.token_ids)} bytes of token ids do not fit the lease"
    if len(rollout.logprobs) != 4 * length:
        return "token ids and log-probs differ in length"
    return (
        _token_fault(rollout, lease, vocab_size)
        or _logprob_fault(rollout.logprobs)
        or _span_fault(rollout, lease, length)
    )


def _episode_fault(rollout: Rollout, lease: Lease, vocab_size: int) -> str:
    """What the environment is said to have said is judged by the environment itself."""
    play, at = lease.play, 0
    if play is None or not rollout.turns:
        return "turns answer a lease to play, and it wants them"
    if len(rollout.turns) > play.max_turns or rollout.length > play.max_tokens or rollout.seats:
        return f"more than {play.max_turns} turns, {play.max_tokens} tokens or one player"
    if len(rollout.token_ids) != len(rollout.logprobs) or len(rollout.token_ids) % 4:
        return "token ids and log-probs differ in length"
    if sum(span.end - span.start for span in rollout.spans) != rollout.drawn:
        return "version spans must cover the drawn tokens alone"
    stops = lease.rules.stop_token_ids
    for turn in rollout.turns:
        if not at <= turn.start < turn.end <= rollout.length or turn.seat:
            return "turns must follow one another"
        at = turn.end
        drawn = part_of(rollout, turn)
        most = min(lease.rules.max_new_tokens, play.max_tokens - turn.start)
        cut = drawn.length == most and drawn.tokens()[-1] not in stops
        ended = replace(drawn, finish="length" if cut else "stop")
        as_leased = replace(lease, play=None, rules=replace(lease.rules, max_new_tokens=most))
        if fault := malformation(ended, as_leased, vocab_size=vocab_size):
            return fault
    return ""


def _token_fault(rollout: Rollout, lease: Lease, vocab_size: int) -> str:
    tokens = rollout.tokens()
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        return f"token ids outside the vocabulary of {vocab_size}"
    # With stop strings, any token may have completed one. Checking texts is left to rewards.
    if rollout.finish == "stop" and tokens[-1] not in lease.rules.stop_token_ids and not lease.rules.stop:
        return "finished by a stop token that is not there"
    if rollout.finish == "length" and len(tokens) != lease.rules.max_new_tokens:
        return "finished by length before the length was reached"
    return ""


def _logprob_fault(data: bytes) -> str:
    values = array("f", data)
    if not math.isfinite(sum(values)) or min(values) < MIN_LOGPROB or max(values) > LOGPROB_SLACK:
        return "log-probs must be finite and at most 0"
    return ""


def _span_fault(rollout: Rollout, lease: Lease, length: int) -> str:
    at, before = 0, None
    for span in rollout.spans:
        if span.start != at or span.end <= span.start:
            return "version spans must cover the tokens without gaps"
        if span.version < lease.min_version:
            return f"version {span.version} is below the lease's {lease.min_version}"
        if before is not None and span.version <= before:
            return "version spans must rise"
        at, before = span.end, span.version
    return "" if at == length else "version spans must cover the tokens without gaps"

"""Which rollouts of a batch are drawn again, with which weights, and what becomes of who is caught."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from swarm.audit.auditing import NEW_TIME_SHARE, TIME_SHARE, Auditing, barred_in, evidence_in, measured_classes
from swarm.audit.auditor import ANY, FIRST_ROLLOUTS, NEW_ROLLOUTS, Auditor, ErrorLimits
from swarm.cli.runs import _audit_lines
from swarm.errors import UserError
from swarm.learner.messages import Audited, AuditRollout
from swarm.rollout.plane.effects import AuditResult, StepWanted
from swarm.rollout.plane.episodes import EpisodeRules, seat_seed
from swarm.rollout.plane.groups import Group
from swarm.types import NodeId, Observed, Score, Span
from tests.builders import ALICE, BOB, STOP, answering, ask, ints, new_plane, prompt, rollout, submit_and_score, v

EXACT = ErrorLimits(bias=0.0005, size=0.001, margin=0.0005, sum=1.0)
CLASSES = {"exact": EXACT, "transformers/float32/cpu": EXACT}
BEGUN = prompt().token_ids


class Audits:
    """A trainer that finds of each rollout what `guilty` seeds deserve, and tokens that are `lies`."""

    def __init__(
        self, directory: Path, *, share: float = 0.05, seconds: float = 0.0, kept: Sequence[int] = (0,)
    ) -> None:
        self.asked: list[tuple[str, tuple[AuditRollout, ...]]] = []
        self.fast: list[bool] = []
        self.guilty: set[int | None] = set()
        self.lies: set[bytes] = set()
        self.off = 0.0
        self.seconds = seconds
        self.engine = "exact"
        self.exact: bool | None = True
        self.events: list[dict[str, Any]] = []
        self.said: list[str] = []
        self.auditing = Auditing(
            directory / "audited",
            Auditor(CLASSES, secret=b"s", share=share),
            self.audit,
            class_of=lambda node: self.engine,
            emit=self.emit,
            say=self.said.append,
        )
        for version in kept:
            self.auditing.place(v(version)).write_bytes(b"")

    async def audit(self, path: Path, rollouts: tuple[AuditRollout, ...], fast: bool) -> Audited:
        self.asked.append((path.name, rollouts))
        self.fast.append(fast)
        lies = [one.seed in self.guilty or one.token_ids in self.lies for one in rollouts]
        lengths = [len(one.token_ids) // 4 for one in rollouts]
        return Audited(
            errors=tuple(array("f", [self.off] * length).tobytes() for length in lengths),
            margins=tuple(array("f", [9.0 * lie] * n).tobytes() for lie, n in zip(lies, lengths, strict=True)),
            exact=not fast if self.exact is None else self.exact,
            seconds=self.seconds,
        )

    async def look(self, batch: Sequence[Group]) -> AuditResult:
        """Audit what is chosen of a batch."""
        return await self.auditing.audit(self.auditing.select(batch))

    async def caught_in(self, batch: Sequence[Group]) -> Mapping[NodeId, str]:
        return (await self.look(batch)).caught

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


def batch_of(*nodes: NodeId, groups: int = 2) -> list[Group]:
    """Groups of two, each answered by one node, in turn."""
    plane = new_plane(groups=groups)
    for number in range(groups):
        node = nodes[number % len(nodes)]
        submit_and_score(plane, node, ask(plane, node, 0, 2), 0)
    assert plane.can_take(now=0.0)
    return plane.take()[0]


def episode_of(*nodes: NodeId, seats: Sequence[int] = (0,)) -> list[Group]:
    """A group of one episode, of which each node in turn draws a turn, as the player of the same place in `seats`."""
    plane = new_plane(groups=1, size=1, episodes=EpisodeRules(max_turns=len(nodes), max_tokens=64))
    players = [seats[turn % len(seats)] for turn in range(len(nodes) + 1)]
    for turn, node in enumerate(nodes):
        (lease,) = ask(plane, node, 0, 1)
        said = plane.submit(node, answering(lease, rollout(group_id=lease.group_id, tokens=(4 + turn, STOP))), now=0.0)
        (wanted,) = [effect for effect in said if isinstance(effect, StepWanted)]
        observed = Observed(token_ids=ints(7), seat=players[turn + 1], done=turn == len(nodes) - 1)
        plane.observed(wanted.group_id, 0, wanted.episode, observed, now=0.0)
        plane.leave(node)  # Or its turn would be kept for it
    assert plane.can_take(now=0.0)
    return plane.take()[0]


def handed_over(*nodes: NodeId) -> list[Group]:
    """A group of one completion, of which each node drew two tokens."""
    plane = new_plane(groups=1, size=1)
    for number, node in enumerate(nodes, 1):
        (lease,) = ask(plane, node, 0, 1)
        is_last = number == len(nodes)
        tokens = (3 + number, STOP if is_last else 9)
        drawn = rollout(group_id=lease.group_id, tokens=tokens, finish="stop" if is_last else "handed")
        plane.submit(node, answering(lease, drawn), now=0.0)
    plane.scored(lease.group_id, 0, Score(reward=1.0, exact=True))
    return plane.take()[0]


def seeds_of(batch: Sequence[Group]) -> set[int | None]:
    return {sample.seed for group in batch for sample in group.samples}


async def test_the_evidence_outlives_the_process_and_is_enough_to_draw_again(tmp_path: Path) -> None:
    audits, batch = Audits(tmp_path), batch_of(ALICE, BOB, groups=8)
    audits.guilty = seeds_of(batch[1::2])
    caught = await audits.caught_in(batch)
    assert barred_in(tmp_path) == caught
    assert list(caught) == [BOB]
    assert "its tokens miss what their seeds draw by 1 nats" in caught[BOB]
    (event,) = audits.events
    assert (event["kind"], event["node"], event["detector"]) == ("caught", BOB, "draws")
    assert event["rollouts"][0].startswith("t1/")
    assert BOB in audits.said[0]
    (known,) = evidence_in(tmp_path)
    assert (known["node"], known["detector"], known["engine"]) == (BOB, "draws", "exact")
    samples = [sample for group in batch[1::2] for sample in group.samples]
    given = {sample.rollout.rollout_id: sample for sample in samples if sample.rollout}
    assert known["evidence"]
    for one in known["evidence"]:
        rollout = given[one["rollout"]].rollout
        assert rollout is not None
        assert one["seed"] == given[one["rollout"]].seed
        assert array("i", one["token_ids"]).tobytes() == rollout.token_ids
        assert array("f", one["logprobs"]).tobytes() == rollout.logprobs
        assert one["margin_nats"] == 9.0
    shown = list(_audit_lines([known], whole=True))
    assert len(shown) == 1 + len(known["evidence"])
    assert shown[1].endswith("tokens miss by 9.000 nats in the mean, log-probs are off by +0.000")


async def test_a_caught_sampler_is_told_what_is_wrong_and_has_one_more_chance(tmp_path: Path) -> None:
    audits, batch = Audits(tmp_path), batch_of(BOB, groups=4)
    audits.guilty = seeds_of(batch)
    assert not audits.auditing.forgive(BOB, "")
    assert not audits.auditing.let_in(BOB)
    for chances in (1, 0):
        assert BOB in await audits.caught_in(batch), "the rollouts of who is forgiven are looked at again"
        assert audits.auditing.select(batch) == []
        assert list(barred_in(tmp_path)) == [BOB]
        assert audits.auditing.fault_of(BOB).startswith("its tokens miss") == bool(chances)
        assert not audits.auditing.forgive(BOB, "refused by its owner")
        assert audits.auditing.forgive(BOB, barred_in(tmp_path)[BOB]) == bool(chances)
        assert list(barred_in(tmp_path)) == [BOB] * (1 - chances)
    assert audits.auditing.let_in(BOB)
    assert not audits.auditing.let_in(BOB)
    audits.auditing._seen.clear()
    assert len(audits.auditing.select(batch)) == 8, "who is let in is a newcomer again"


@pytest.mark.parametrize(("engine", "exact"), [("mlx", True), ("exact", False), ("", True)])
async def test_who_lies_is_barred_whatever_it_calls_its_engine(tmp_path: Path, engine: str, exact: bool) -> None:
    audits, batch = Audits(tmp_path), batch_of(BOB, groups=16)
    audits.engine, audits.exact = engine, exact
    audits.guilty = seeds_of(batch)
    assert BOB in await audits.caught_in(batch)
    assert list(barred_in(tmp_path)) == [BOB]


@pytest.mark.parametrize(("off", "exact", "is_caught"), [(0.1, True, True), (0.1, False, False), (1.0, False, True)])
async def test_log_probs_are_judged_as_finely_as_they_were_recomputed(
    tmp_path: Path, off: float, exact: bool, is_caught: bool
) -> None:
    audits, batch = Audits(tmp_path), batch_of(BOB, groups=40)
    audits.off, audits.exact = off, exact
    result = await audits.look(batch)
    assert bool(result.caught) == is_caught
    assert result.recomputed == {}, "claims of a measured class are trained with"


async def test_claims_of_an_unmeasured_class_are_replaced_by_what_was_recomputed(tmp_path: Path) -> None:
    audits, batch = Audits(tmp_path, share=0.0), batch_of(BOB, groups=40)
    audits.engine, audits.off = "vllm/bfloat16/cuda", ANY.bias / 2
    chosen = audits.auditing.select(batch)
    assert len(chosen) == 80, "all are drawn again, whoever they are from"
    result = await audits.auditing.audit(chosen)
    assert result.caught == {}
    assert set(audits.fast) == {True}
    for group in batch:
        for sample in group.samples:
            assert sample.rollout is not None
            claimed = array("f", sample.rollout.logprobs)
            audited, logprobs = result.recomputed[group.group_id, sample.rollout.index]
            assert audited is sample.rollout
            own = array("f", logprobs)
            assert list(own) == pytest.approx([value - audits.off for value in claimed])


async def test_of_an_episode_only_what_an_unmeasured_sampler_drew_is_replaced(tmp_path: Path) -> None:
    audits, (group,) = Audits(tmp_path), episode_of(ALICE, BOB)
    audits.off = 0.01
    audits.auditing._class_of = lambda node: "exact" if node == ALICE else "new"
    result = await audits.look([group])
    rollout = group.samples[0].rollout
    assert rollout is not None
    claimed, own = (array("f", one) for one in (rollout.logprobs, result.recomputed[group.group_id, 0][1]))
    changed = {at for at, (before, after) in enumerate(zip(claimed, own, strict=True)) if before != after}
    (turn,) = [turn for turn in rollout.turns if turn.node == BOB]
    assert changed == set(range(turn.start, turn.end))


async def test_one_sampler_in_half_precision_widens_nobody_else_s_limits(tmp_path: Path) -> None:
    audits, batch = Audits(tmp_path), batch_of(ALICE, BOB, groups=80)
    audits.off, audits.exact = 0.1, None
    audits.auditing._class_of = lambda node: "transformers/float32/cpu" if node == ALICE else "unknown"
    result = await audits.look(batch)
    assert list(result.caught) == [ALICE]
    assert sorted(set(audits.fast)) == [False, True]


async def test_greedy_answers_are_judged_by_their_draws_alone(tmp_path: Path) -> None:
    audits, batch = Audits(tmp_path), batch_of(BOB, groups=16)
    for group in batch:
        group.purpose, group.rules = "eval", structs.replace(group.rules, temperature=0.0)
    audits.off = 0.9
    result = await audits.look(batch)
    assert (result.caught, result.recomputed) == ({}, {})
    assert {one.seed for _, asked in audits.asked for one in asked} == {None}


async def test_an_answer_is_genuine_or_not_or_nobody_knows(tmp_path: Path) -> None:
    audits, (group,) = Audits(tmp_path, kept=()), batch_of(BOB, groups=1)
    first, second = group.samples
    assert (await audits.auditing.is_genuine(group, first))[0] is None
    audits.auditing.place(v(0)).write_bytes(b"")
    audits.guilty = {second.seed}
    assert (await audits.auditing.is_genuine(group, first))[0]
    found = [await audits.auditing.is_genuine(group, second) for _ in range(4)]
    assert not any(genuine for genuine, _ in found)
    assert list(found[-1][1].caught) == [BOB], "answers on which rewards fail are evidence too"


def test_the_owner_of_the_learner_s_machine_may_measure_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert measured_classes()["transformers/float32/cpu"].margin < 0.01
    assert "vllm/bfloat16/cuda" not in measured_classes()
    path = tmp_path / "echo-node" / "classes.toml"
    path.parent.mkdir()
    path.write_text('["vllm/bfloat16/cuda"]\nbias = 0.01\nsize = 0.2\nmargin = 0.01\nsum = 8\n')
    assert measured_classes()["vllm/bfloat16/cuda"].bias == 0.01
    assert "transformers/float32/cpu" in measured_classes()
    path.write_text("bias = 1")
    with pytest.raises(UserError, match=r"cannot read the measured classes of engines in .*classes\.toml"):
        measured_classes()


async def test_without_the_weights_nothing_is_found_and_nothing_looked_at_twice(tmp_path: Path) -> None:
    audits, batch = Audits(tmp_path, kept=()), batch_of(ALICE)
    assert await audits.caught_in(batch) == {}
    assert audits.asked == []
    assert audits.auditing.select(batch) == []
    assert [(event["kind"], event["version"]) for event in audits.events] == [("unaudited", "0.0")]
    assert "not kept" in audits.said[0]


async def test_each_part_of_a_rollout_is_drawn_again_by_the_version_that_drew_it(tmp_path: Path) -> None:
    audits, (group,) = Audits(tmp_path, kept=(0, 1)), batch_of(BOB, groups=1)
    sample = group.samples[0]
    assert sample.rollout is not None
    cut, end = Span(version=v(0), start=0, end=1), sample.rollout.length
    sample.rollout = structs.replace(sample.rollout, spans=(cut, Span(version=v(1), start=1, end=end)))
    await audits.look([group])
    (first, whole), (rest,) = (asked for _, asked in audits.asked)
    tokens = sample.rollout.token_ids
    assert [name for name, _ in audits.asked] == ["0.0.bin", "0.1.bin"]
    assert first.token_ids == tokens[:4]
    assert len(whole.token_ids) == 4 * end
    assert rest.prompt_token_ids == (*group.prompt.token_ids, *array("i", tokens[:4]))
    assert (rest.token_ids, rest.seed) == (tokens[4:], sample.seed)
    assert audits.auditing.audited == 2


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        (
            episode_of(ALICE, BOB, ALICE),
            [(BEGUN, 4, 0), ((*BEGUN, 4, STOP, 7, 5, STOP, 7), 6, 0), ((*BEGUN, 4, STOP, 7), 5, 0)],
        ),
        (
            episode_of(ALICE, BOB, ALICE, BOB, seats=(0, 1)),
            [(BEGUN, 4, 0), ((*BEGUN, 4, STOP, 7), 6, 0), ((7,), 5, 1), ((7, 5, STOP, 7), 7, 1)],
        ),
    ],
    ids=["one player", "two players"],
)
async def test_each_turn_of_an_episode_is_drawn_again_from_all_that_its_player_had_read_and_its_own_seed(
    tmp_path: Path, batch: list[Group], expected: list[tuple[tuple[int, ...], int, int]]
) -> None:
    audits = Audits(tmp_path)
    assert await audits.caught_in(batch) == {}
    ((_, asked),) = audits.asked
    assert [(one.prompt_token_ids, one.token_ids, one.seed) for one in asked] == [
        (read, ints(token, STOP), seat_seed(batch[0].samples[0].seed, seat)) for read, token, seat in expected
    ]
    assert audits.auditing.audited == 2, "all turns of a sampler are one rollout"
    assert audits.auditing.select(batch) == []


async def test_each_part_of_what_was_handed_over_is_drawn_again_after_all_that_stood_before(tmp_path: Path) -> None:
    audits, (group,) = Audits(tmp_path), handed_over(ALICE, BOB, ALICE)
    assert await audits.caught_in([group]) == {}
    ((_, asked),) = audits.asked
    seed = group.samples[0].seed
    assert [(one.prompt_token_ids, one.token_ids, one.seed) for one in asked] == [
        (BEGUN, ints(4, 9), seed),
        ((*BEGUN, 4, 9, 5, 9), ints(6, STOP), seed),
        ((*BEGUN, 4, 9), ints(5, 9), seed),
    ]
    assert (await audits.auditing.is_genuine(group, group.samples[0]))[0] is None, "which of them is to blame?"


@pytest.mark.parametrize("liar", [ALICE, BOB])
@pytest.mark.parametrize(
    ("made", "drawn", "between"),
    [(episode_of, (ints(4, STOP), ints(5, STOP)), [4, STOP, 7]), (handed_over, (ints(4, 9), ints(5, STOP)), [4, 9])],
    ids=["a turn", "a part"],
)
async def test_who_lies_in_what_it_drew_is_caught_alone(
    tmp_path: Path, liar: NodeId, made: Callable[..., list[Group]], drawn: tuple[bytes, bytes], between: list[int]
) -> None:
    """BOB hands in the last turn or part, and is the author of the whole."""
    audits, place = Audits(tmp_path), (ALICE, BOB).index(liar)
    audits.lies = {drawn[place]}
    caught: dict[NodeId, str] = {}
    while not caught and len(audits.asked) < NEW_ROLLOUTS:
        audits.auditing._seen.clear()
        caught |= await audits.caught_in(made(ALICE, BOB))
    assert list(caught) == [liar]
    (known,) = evidence_in(tmp_path)
    assert known["node"] == liar
    assert {one["rollout"] for one in known["evidence"]} == {"t0/0"}
    assert all(one["prompt_token_ids"] == [*BEGUN, *between * place] for one in known["evidence"])


async def test_tokens_after_the_end_of_an_answer_were_not_drawn(tmp_path: Path) -> None:
    audits, batch = Audits(tmp_path), batch_of(BOB, groups=4)
    for sample in (sample for group in batch for sample in group.samples):
        assert sample.rollout is not None
        tokens = array("i", sample.rollout.token_ids)
        tokens[0] = tokens[-1]
        sample.rollout = structs.replace(sample.rollout, token_ids=tokens.tobytes())
    assert BOB in await audits.caught_in(batch)


async def test_who_draws_what_a_caught_sampler_gave_is_audited_too(tmp_path: Path) -> None:
    audits, batch = Audits(tmp_path), batch_of(BOB)
    await audits.look(batch)
    for group in batch:
        for sample in group.samples:
            sample.author = ALICE
    assert {one.node for one in audits.auditing.select(batch)} == {ALICE}


async def test_newcomers_are_audited_as_far_as_there_is_time_and_their_first_rollouts_in_any_case(
    tmp_path: Path,
) -> None:
    audits, batch = Audits(tmp_path, share=0.0, seconds=8.0), batch_of(ALICE, BOB, groups=40)
    first = audits.auditing.select(batch)
    assert Counter(one.node for one in first) == {ALICE: FIRST_ROLLOUTS, BOB: FIRST_ROLLOUTS}
    await audits.auditing.audit(first)
    assert audits.auditing.select(batch) == [], "half a second each, and no step was taken yet"
    audits.auditing.trained_s = (8.0 + 5.0) / NEW_TIME_SHARE
    more = audits.auditing.select(batch)
    assert len(more) == 10
    await audits.auditing.audit(more)
    audits.auditing.trained_s = 1e9
    assert len(audits.auditing.select(batch)) == 80 - 26


async def test_a_newcomer_that_lies_is_audited_in_full_before_its_batch_is_taken(tmp_path: Path) -> None:
    """Its first rollouts make it suspect, and then there is no limit."""
    audits, batch = Audits(tmp_path, share=0.0, seconds=8.0), batch_of(ALICE, groups=40)
    first = audits.auditing.select(batch)
    assert len(first) == FIRST_ROLLOUTS
    audits.guilty = {one.seed for one in first[:3]}
    await audits.auditing.audit(first)
    assert len(audits.auditing.select(batch)) == 80 - FIRST_ROLLOUTS


async def test_audits_of_known_samplers_stay_within_their_share_of_the_time(tmp_path: Path) -> None:
    audits = Audits(tmp_path, share=1.0, seconds=1.0)
    for _ in range(NEW_ROLLOUTS // 2):
        batch = batch_of(ALICE, groups=1)
        audits.auditing._seen.clear()
        await audits.look(batch)
    audits.auditing._seen.clear()
    audits.auditing._auditor._share = 0.99
    assert audits.auditing.spent_s > 0
    assert audits.auditing.select(batch), "newcomers have emptied the purse of the others"
    await audits.look(batch)
    audits.auditing._seen.clear()
    assert audits.auditing.sampled_s > 0
    audits.auditing.trained_s = 0.99 / TIME_SHARE * audits.auditing.sampled_s
    assert audits.auditing.select(batch) == []
    audits.auditing.trained_s = 1.01 / TIME_SHARE * audits.auditing.sampled_s
    assert audits.auditing.select(batch)


def test_weights_are_given_up_that_no_batch_can_need(tmp_path: Path) -> None:
    audits = Audits(tmp_path, kept=(0, 1, 2, 10))
    audits.auditing.measured = v(1)
    audits.auditing.prune(2)
    assert audits.auditing.place(v(1)).exists(), "a held-out round of it is under way"
    audits.auditing.measured = v(2)
    audits.auditing.prune(2)
    assert sorted(path.name for path in (tmp_path / "audited").iterdir()) == ["0.10.bin", "0.2.bin"]

"""What every engine does alike, whichever library answers: run against each of them, in this order, over one life."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from swarm.broadcast.store.changes import write_changes
from swarm.broadcast.version.manifest import Layout, regions_of
from swarm.models.draws import gumbel
from swarm.sampler.engine import Engine, Generate, Installed, Job, NotInstalled, Sampled, Started
from swarm.sampler.stopping import load_tokenizer
from swarm.types import SamplingRules, VersionId
from tests.builders import STOP, v
from tests.unit.models import Staged, published

PROMPT = (1, 3, 4, 5)
LONG = 100  # Tokens, which take any engine some time


@dataclass(slots=True, kw_only=True)
class Life:
    """A started engine, the weights of two versions in turn, and what was installed last."""

    engine: Engine
    started: Started
    staged: tuple[Staged, Staged]
    directory: Path
    version: int = -1
    told: list[int] = field(default_factory=list)

    def progress(self) -> None:
        self.told.append(self.version)

    async def steps(self, count: int) -> None:
        """Wait until work has gone on so many times; an engine's thread may be the one to say so."""
        for _ in range(60_000):
            if len(self.told) >= count:
                return
            await asyncio.sleep(0.001)
        raise AssertionError("the engine does nothing")

    async def install(self) -> VersionId:
        """The next version, which every engine takes."""
        self.version += 1
        done = await self.engine.install(self.staged[self.version % 2].install(self.version), self.progress)
        assert isinstance(done, Installed), done
        return v(self.version)

    async def installed(self) -> VersionId:
        """Whatever is held; something, if nothing yet."""
        return v(self.version) if self.version >= 0 else await self.install()

    async def draw(self, *jobs: Job) -> tuple[Sampled, ...]:
        return (await self.engine.generate(Generate(jobs=jobs), self.progress)).samples


def job(
    seed: int,
    *,
    prompt: tuple[int, ...] = PROMPT,
    temperature: float = 1.0,
    limit: int = 12,
    stops: tuple[int, ...] = (STOP,),
    stop: tuple[str, ...] = (),
    time_limit_s: float = 60.0,
) -> Job:
    rules = SamplingRules(temperature=temperature, max_new_tokens=limit, stop_token_ids=stops, stop=stop)
    return Job(prompt_token_ids=prompt, seed=seed, rules=rules, time_limit_s=time_limit_s)


def tokens(sampled: Sampled) -> list[int]:
    return array("i", sampled.token_ids).tolist()


def logprobs(sampled: Sampled) -> list[float]:
    return array("f", sampled.logprobs).tolist()


async def says_what_it_is(life: Life) -> None:
    started = life.started
    assert started.engine
    assert started.device
    assert 1 <= started.places <= 8


async def draws_nothing_before_it_holds_a_version(life: Life) -> None:
    assert life.version == -1, "this check needs a new engine"
    with pytest.raises(AssertionError):
        await life.draw(job(0))


async def names_the_version_of_every_token(life: Life) -> None:
    for _ in range(2):
        version = await life.install()
        for sampled in await life.draw(*(job(seed) for seed in range(4))):
            assert [(span.version, span.start) for span in sampled.spans] == [(version, 0)]
            assert sampled.spans[0].end == len(tokens(sampled)) == len(logprobs(sampled))


async def ends_every_completion_for_the_reason_it_names(life: Life) -> None:
    await life.installed()
    ends = set[str]()
    for seed in range(8):
        sampled = (await life.draw(job(seed, limit=24)))[0]
        drawn = tokens(sampled)
        ends.add(sampled.finish)
        assert sampled.fault == ""
        assert (drawn[-1] == STOP) is (sampled.finish == "stop")
        assert STOP not in drawn[:-1]
        assert len(drawn) == 24 or sampled.finish == "stop"
    assert "stop" in ends
    assert {one.finish for one in await life.draw(job(0, stops=()), job(1, stops=()))} == {"length"}


async def ends_with_the_token_that_completes_a_stop_string(life: Life) -> None:
    """Jobs of one call differ in their rules, and what is cut off is the same draw as without a stop string."""
    await life.installed()
    tokenizer = load_tokenizer(str(life.staged[0].files_dir))
    rules = [("00", "12", "21", "33", "5=", "78"), ("<bos>1", "02"), ("never",), ()]
    plain = [job(seed, limit=24, stops=()) for seed in range(16)]
    ruled = [job(seed, limit=24, stops=(), stop=rules[seed % 4]) for seed in range(16)]
    ends = Counter[str]()
    for asked, whole, cut in zip(ruled, await life.draw(*plain), await life.draw(*ruled), strict=True):
        length = len(tokens(cut))
        ends[cut.finish] += length < 24
        assert tokens(cut) == tokens(whole)[:length]
        assert logprobs(cut) == pytest.approx(logprobs(whole)[:length], abs=1e-4)
        assert cut.spans[-1].end == length
        text, before = (tokenizer.decode(tokens(cut)[:n], skip_special_tokens=False) for n in (length, length - 1))
        assert any(stop in text for stop in asked.rules.stop) is (cut.finish == "stop")
        assert not any(stop in before for stop in asked.rules.stop)
        assert length == 24 or cut.finish == "stop"
    assert ends["stop"]


async def repeats_a_seed(life: Life) -> None:
    await life.installed()
    (first,) = await life.draw(job(7, stops=()))
    crowd = await life.draw(job(7, stops=()), job(8, stops=()), job(9, stops=()))
    assert tokens(crowd[0]) == tokens(first)
    assert len({tuple(tokens(one)) for one in crowd}) == 3


async def draws_as_anybody_can_replay(life: Life) -> None:
    """With the learner's weights and the noise of the seed, every token is the best one, or as good as the best, and
    has the learner's log-prob. Temperature 0 draws without noise; its log-probs are those at temperature 1."""
    version = await life.installed()
    if life.started.engine == "scripted":
        return  # it draws from no distribution
    learner = published(life.staged[version.version % 2].model)
    temperatures = (0.0, 0.5, 0.7, 0.9, 1.0, 1.1, 1.3, 1.7)
    jobs = [
        job(2**62 + seed, prompt=PROMPT[: 2 + seed % 3], temperature=temperature, stops=())
        for seed, temperature in enumerate(temperatures)
    ]
    for asked, sampled in zip(jobs, await life.draw(*jobs), strict=True):
        prompt, drawn = asked.prompt_token_ids, tokens(sampled)
        places = torch.arange(len(prompt) - 1, len(prompt) + len(drawn) - 1)
        with torch.no_grad():
            logits = learner(torch.tensor([[*prompt, *drawn]])).logits[0, places].float()
        scaled, chosen = logits / (asked.rules.temperature or 1.0), torch.tensor(drawn)[:, None]
        noise = gumbel(torch.full_like(places, asked.seed), places, logits.shape[1])
        noised = scaled + noise if asked.rules.temperature else scaled
        missing = noised.max(-1).values - noised.gather(1, chosen)[:, 0]
        assert float(missing.max()) < 1e-3
        assert logprobs(sampled) == pytest.approx(scaled.log_softmax(-1).gather(1, chosen)[:, 0].tolist(), abs=1e-4)


async def goes_on_elsewhere_as_it_would_have(life: Life) -> None:
    await life.installed()
    if life.started.engine == "scripted":
        return  # it draws from no distribution
    (whole,) = await life.draw(job(11, stops=()))
    for done in (1, 5):
        (rest,) = await life.draw(job(11, prompt=(*PROMPT, *tokens(whole)[:done]), limit=12 - done, stops=()))
        assert tokens(rest) == tokens(whole)[done:]


async def answers_calls_side_by_side(life: Life) -> None:
    await life.installed()
    answers = await asyncio.gather(*(life.draw(job(seed, limit=2 + seed, stops=())) for seed in range(8)))
    assert [len(tokens(one)) for (one,) in answers] == [2 + seed for seed in range(8)]
    done = await life.engine.generate(Generate(jobs=(job(0, stops=()),)), life.progress)
    assert done.steps == 12
    assert done.seconds >= 0


async def cuts_off_what_takes_too_long(life: Life) -> None:
    await life.installed()
    if life.started.engine == "scripted":
        return  # without a rehearsed pace its draws take no time
    (sampled,) = await life.draw(job(0, stops=(), time_limit_s=0.0))
    if life.started.engine == "transformers":
        assert (sampled.finish, len(tokens(sampled)), sampled.spans[-1].end) == ("handed", 1, 1)
        return
    assert (sampled.finish, sampled.fault) == ("failed", "time limit")
    assert (sampled.token_ids, sampled.logprobs, sampled.spans) == (b"", b"", ())


async def refuses_a_file_that_was_not_signed_and_goes_on(life: Life) -> None:
    version = await life.installed()
    held = await life.draw(job(3))
    following = life.staged[(life.version + 1) % 2]
    data = bytearray(following.staging.read_bytes())
    data[len(data) // 2] ^= 1
    flipped, short = life.directory / "flipped.bin", life.directory / "short.bin"
    flipped.write_bytes(data)
    short.write_bytes(data[:-2])
    for path in (flipped, short):
        asked = msgspec.structs.replace(following.install(life.version + 1), path=str(path))
        refused = await life.engine.install(asked, life.progress)
        assert isinstance(refused, NotInstalled)
        assert refused.fault == "file"
    assert await life.draw(job(3)) == held
    assert held[0].spans[0].version == version


async def takes_the_words_that_changed(life: Life) -> None:
    """From version to version, twice; the second time over a gap, for which the same words are too few."""
    await life.installed()
    before = life.staged[life.version % 2]
    after = life.staged[(life.version + 1) % 2]
    changed = differing(before.staging, after.staging, after.layout, life.directory / "changed")
    asked = msgspec.structs.replace(
        after.install(life.version + 1), proven=True, since=v(life.version), changed=str(changed)
    )
    life.version += 1
    assert isinstance(await life.engine.install(asked, life.progress), Installed)
    await draws_as_anybody_can_replay(life)
    # An engine that does not hold `since` needs all of the file.
    life.version += 2
    asked = msgspec.structs.replace(
        after.install(life.version), proven=True, since=v(life.version - 1), changed=str(changed)
    )
    assert isinstance(await life.engine.install(asked, life.progress), Installed)
    await draws_as_anybody_can_replay(life)


def differing(before: Path, after: Path, layout: Layout, path: Path) -> Path:
    """Write to `path` which words of two files of weights differ."""
    old, new = np.fromfile(before, dtype="<u2"), np.fromfile(after, dtype="<u2")
    regions = regions_of(layout)
    words = [slice(region.start // 2, (region.start + region.nbytes) // 2) for region in regions]
    places = {i: np.flatnonzero(old[at] != new[at]).astype(np.uint32) for i, at in enumerate(words)}
    write_changes(path, len(regions), places)
    return path


async def shows_that_work_goes_on(life: Life) -> None:
    await life.installed()
    life.told.clear()
    await life.install()
    assert life.told
    life.told.clear()
    await life.draw(job(0, stops=()))
    assert life.told or life.started.engine == "scripted", "without a rehearsed pace its draws take no time"


async def ends_each_at_its_own_limit(life: Life) -> None:
    """What one call draws may be of any length, such as the rest of what others began."""
    await life.installed()
    limits = (3, 12, 7, 1)
    wholes = await life.draw(*(job(seed, stops=()) for seed in range(4)))
    drawn = await life.draw(*(job(seed, limit=limit, stops=()) for seed, limit in enumerate(limits)))
    for limit, whole, one in zip(limits, wholes, drawn, strict=True):
        assert (one.finish, tokens(one)) == ("length", tokens(whole)[:limit])
        assert logprobs(one) == pytest.approx(logprobs(whole)[:limit], abs=1e-4)


async def gives_up_what_is_under_way(life: Life) -> None:
    """What has come is what would have come, and anybody can go on with it. Nothing is drawn afterwards, so this is no
    check of a life that others share."""
    await life.installed()
    if life.started.engine == "scripted":
        return  # without a rehearsed pace its draws take no time
    jobs = [job(20 + seed, limit=LONG, stops=(), stop=stop) for seed, stop in enumerate([(), (), ("never",)])]
    wholes = await life.draw(*jobs)
    life.told.clear()
    drawing = asyncio.create_task(life.draw(*jobs))
    await life.steps(10)  # Some read prompts first
    life.engine.give_up()
    for whole, part in zip(wholes, await drawing, strict=True):
        count = len(tokens(part))
        assert (part.finish, part.fault) == ("handed", "")
        assert 1 <= count < LONG
        assert tokens(part) == tokens(whole)[:count]
        assert logprobs(part) == pytest.approx(logprobs(whole)[:count], abs=1e-4)
        assert part.spans == (msgspec.structs.replace(whole.spans[0], end=count),)
    (late,) = await life.draw(jobs[0])
    assert len(tokens(late)) <= 1


CHECKS: tuple[Callable[[Life], Awaitable[None]], ...] = (
    says_what_it_is,
    draws_nothing_before_it_holds_a_version,
    names_the_version_of_every_token,
    ends_every_completion_for_the_reason_it_names,
    ends_with_the_token_that_completes_a_stop_string,
    repeats_a_seed,
    draws_as_anybody_can_replay,
    goes_on_elsewhere_as_it_would_have,
    answers_calls_side_by_side,
    cuts_off_what_takes_too_long,
    refuses_a_file_that_was_not_signed_and_goes_on,
    takes_the_words_that_changed,
    ends_each_at_its_own_limit,
    shows_that_work_goes_on,
)


async def begin(engine: Engine, directory: Path, staged: tuple[Staged, Staged]) -> Life:
    """Start `engine` with 8 places."""
    started = await engine.start(staged[0].start(places=8), lambda: None)
    return Life(engine=engine, started=started, staged=staged, directory=directory)

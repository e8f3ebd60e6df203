"""Samplers that end in the middle of their work, as real processes: others go on at the next token, or draw again."""

from __future__ import annotations

import json
import random
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.learner.tiny import tiny_model
from swarm.models.draws import gumbel
from swarm.rollout.plane.groups import sample_seed
from swarm.types import GroupId
from tests.integration.processes import Learner, Swarm, command, eventually
from tests.integration.slow_sampler import METADATA, MODULE
from tests.unit.models import published

SEED = 5
ENDS = "killed", "told", "taken"
FROZEN = 1e-30  # A learning rate at which no weight changes


class Google(BaseHTTPRequestHandler):
    """A cloud's service, which gives a notice once it is told to."""

    is_over = threading.Event()

    def do_GET(self) -> None:
        is_asked = self.path.endswith("/instance/preempted") and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if is_asked else 404)
        self.end_headers()
        self.wfile.write(b"TRUE" if self.is_over.is_set() else b"FALSE")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Google) as server:
        monkeypatch.setenv(METADATA, f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever).start()
        yield
        server.shutdown()


@pytest.mark.slow
def test_what_leaving_samplers_had_begun_is_what_one_sampler_would_have_drawn(swarm: Swarm) -> None:
    """Every token is the best one under the noise of its sample's seed, and has the model's own log-prob, on both sides
    of each joint. Who is killed hands over nothing, and what it had begun is lost; the last is taken by its cloud."""
    swarm.lead_with(learning_rate=FROZEN, weight_decay=0.0, max_new_tokens=100, eval_every_steps=1_000_000)
    learner = swarm.lead("--steps", "1000000", "--port", "0", "--seed", str(SEED))
    chance = random.Random(SEED)
    for number, end in enumerate(ENDS):
        how = ("--spot",) if end == "taken" else ("--grace", "0")
        leaver = swarm.join(learner.url(), *how, name=f"leaver-{number}", module=f"{MODULE} swarm")
        eventually(lambda: leaver.status()["state"] == "sampling", leaver, "it draws")  # noqa: B023
        accepted = learner.status()["verdicts"].get("accepted", 0)
        wanted = accepted + chance.randrange(8)
        eventually(lambda: learner.status()["verdicts"].get("accepted", 0) >= wanted, leaver, "some end")  # noqa: B023
        if end == "killed":
            lost, node = learner.status()["rollouts_lost"], leaver.status()["node"]
            eventually(lambda: is_measured(learner, node), leaver, "the learner knows its rate")  # noqa: B023
            eventually(lambda: learner.status()["samples_leased"], leaver, "it has some under way")
            leaver.kill()
            eventually(lambda: learner.status()["rollouts_lost"] > lost, learner, "it is missed")  # noqa: B023
            continue
        if end == "taken":
            Google.is_over.set()
        else:
            leaver.signal(signal.SIGTERM)
        assert leaver.wait() == 0
        assert leaver.says("Google is about to take this machine away") is (end == "taken")
    last = swarm.join(learner.url(), name="last")
    whole = f"{swarm.directory}/rollouts.jsonl"
    step = learner.status()["step"]
    eventually(lambda: learner.status()["step"] >= step + 4, last, "what was begun is trained on")
    handed = learner.status()["verdicts"]["handed"]
    learner.signal(signal.SIGINT)
    assert learner.wait() == 130
    learner.verified()
    assert command("export", "rollouts", str(learner.run_dir), "--to", whole).returncode == 0
    rows = [json.loads(line) for line in Path(whole).read_text().splitlines()]
    joints = sum(len({span["node"] for span in row["spans"]}) > 1 for row in rows)
    assert 0 < joints <= handed
    model = published(tiny_model(SEED))
    for row in rows:
        assert_drawn(model, row)


def is_measured(learner: Learner, node: str) -> bool:
    return bool(learner.status()["capacity"]["inputs"]["by_node"][node]["lockstep"])


def assert_drawn(model: Any, row: dict[str, Any]) -> None:
    prompt, drawn = row["prompt_token_ids"], torch.tensor(row["token_ids"])
    places = torch.arange(len(prompt) - 1, len(prompt) + len(drawn) - 1)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *row["token_ids"]]])).logits[0, places].float()
    seed = sample_seed(SEED, GroupId(f"t{row['group']}"), row["index"])
    best = (logits + gumbel(torch.full_like(places, seed), places, logits.shape[1])).argmax(-1)
    assert torch.equal(best, drawn), row
    own = logits.log_softmax(-1).gather(1, drawn[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(row["logprobs"]), own, atol=1e-4, rtol=0)

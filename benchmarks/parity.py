"""Loss and gradient of one learner step, beside TRL's of the same batch: same model, rollouts, log-probs and rewards.
And of one step of `sft`: same model and examples, each tokenised and masked by either side.

    bin/python -m benchmarks.parity --json

TRL is in the extra `bench`. The rollouts are off-policy: their log-probs are those of the model with other weights, so
that ratios are on both sides of every clip. TRL divides by the sample's standard deviation; its advantages are given
ours. Both compute in float32 on the CPU; a difference is relative to the largest element of TRL's gradient.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from swarm.learner.advantages import rows_of
from swarm.learner.batch import Row
from swarm.learner.messages import TrainerConfig, TrainGroup, TrainRollout
from swarm.learner.optimizer import AdamW
from swarm.learner.policy import Policy
from swarm.learner.ranks import Ranks
from swarm.learner.sft import Example, Tuner
from swarm.learner.tiny import tiny_model, tiny_tokenizer
from swarm.learner.update import Learning, Update

LONGEST = 12
GROUPS, GROUP_SIZE = 6, 8
CPU = torch.device("cpu")

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({}, {"loss_type": "dapo"}),
    "grpo": ({"loss_normalisation": "rollouts"}, {"loss_type": "grpo"}),
    "gspo": (
        {"objective": "gspo", "loss_normalisation": "rollouts", "clip": (3e-2, 4e-2)},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
    ),
    "cispo": ({"objective": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "kl": ({"kl_weight": 0.1}, {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False}),
    "entropy": ({"entropy_weight": 0.05}, {"loss_type": "dapo", "entropy_coef": 0.05}),
}
"""What a case sets here, and in TRL. For cispo TRL's epsilon_high is the cap itself."""

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '=' }}{% endif %}{% endfor %}"
)
EXAMPLES = 24  # Of one batch of `sft`


class Recorded(AdamW):
    """Keeps the gradient and changes nothing."""

    def step(self) -> None:  # type: ignore[override]  # Without closure, as ours
        self.gradient = [p.grad.detach().clone() for group in self.param_groups for p in group["params"]]


def batch(draw: torch.Generator) -> tuple[TrainGroup, ...]:
    """Rollouts of 1 to LONGEST tokens, drawn and scored at random; log-probs come from a model that has moved."""
    moved = moved_model(draw)
    vocab = moved.config.vocab_size
    groups = []
    for _ in range(GROUPS):
        prompt = torch.randint(3, vocab, (5,), generator=draw).tolist()
        rollouts = []
        for _ in range(GROUP_SIZE):
            length = int(torch.randint(1, LONGEST + 1, (), generator=draw))
            ids = torch.randint(3, vocab, (length,), generator=draw)
            logprobs = logprobs_of(moved, torch.tensor([*prompt, *ids.tolist()]), len(prompt))
            rollouts.append(
                TrainRollout(
                    token_ids=ids.int().numpy().tobytes(),
                    logprobs=logprobs.numpy().tobytes(),
                    reward=float(torch.rand((), generator=draw)),
                    staleness=1,
                )
            )
        groups.append(TrainGroup(prompt_token_ids=tuple(prompt), rollouts=tuple(rollouts)))
    return tuple(groups)


def moved_model(draw: torch.Generator) -> Any:
    model = tiny_model(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=draw)
    return model


def reference_model() -> Any:
    """Another one than what drew the rollouts."""
    return moved_model(torch.Generator().manual_seed(1))


@torch.no_grad()
def logprobs_of(model: Any, ids: torch.Tensor, prompt_tokens: int) -> torch.Tensor:
    logits = model(input_ids=ids[None]).logits[0, prompt_tokens - 1 : -1]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, ids[prompt_tokens:, None])[:, 0]
    return found


def ours(groups: tuple[TrainGroup, ...], rules: TrainerConfig) -> tuple[float, list[torch.Tensor]]:
    model = tiny_model(0)
    given = {"tokens_per_micro_batch": 100, "device": "cpu", "warmup_steps": 0, "minibatches": 1}
    config = rules.model_copy(update=given)
    optimizer = Recorded(model.parameters(), "float32", lr=0.0, weight_decay=0.0)
    learning = Learning(
        model=model,
        optimizer=optimizer,
        shuffle=torch.Generator().manual_seed(0),
        policy=Policy(model, config, temperature=1.0),
        reference=Policy(reference_model(), config, temperature=1.0) if rules.kl_weight else None,
        ranks=Ranks(),
        device=CPU,
        progress=lambda: None,
    )
    figures, _ = Update(config, learning).step(groups, 0)
    # A norm above 1 was clipped to it.
    return figures["loss"], [max(1.0, figures["grad_norm"]) * one for one in optimizer.gradient]


def theirs(rows: list[Row], options: dict[str, Any], directory: Path) -> tuple[float, list[torch.Tensor]]:
    given = {"epsilon": 0.2, "epsilon_high": 0.28, **options}
    beta = given.pop("beta", 0.0)
    config = GRPOConfig(
        output_dir=str(directory),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=len(rows),
        num_generations=GROUP_SIZE,
        max_completion_length=LONGEST,
        gradient_checkpointing=False,
        **given,
    )
    trainer = GRPOTrainer(
        model=tiny_model(0),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["1"] * len(rows)}),
        processing_class=tiny_tokenizer(),
    )
    model, reference = trainer.model.train(), reference_model()
    trainer.beta = beta  # Set in its options it would load a reference model by the name of this one, which has none
    trainer.current_gradient_accumulation_steps = 1
    prompts = torch.stack([row.token_ids[: row.prompt_tokens] for row in rows])
    mask = padded([row.mask for row in rows])
    loss = trainer._compute_loss(
        model,
        {
            "prompt_ids": prompts,
            "prompt_mask": torch.ones_like(prompts),
            "completion_ids": padded([row.token_ids[row.prompt_tokens :] for row in rows]),
            "completion_mask": mask.long(),
            "advantages": torch.tensor([row.advantage for row in rows]),
            "old_per_token_logps": padded([row.behaviour for row in rows]),
            "ref_per_token_logps": padded([logprobs_of(reference, row.token_ids, row.prompt_tokens) for row in rows]),
            "num_items_in_batch": mask.sum(),
        },
    )
    loss.backward()
    return float(loss.detach()), [p.grad for p in model.parameters()]


# -- sft -------------------------------------------------------------------------------------------------------------


def examples(draw: torch.Generator) -> dict[str, list[dict[str, Any]]]:
    """Chats of one and two answers, prompts with completions, and the same as messages; of 1 to LONGEST digits."""

    def digits() -> str:
        length = int(torch.randint(1, LONGEST + 1, (), generator=draw))
        return "".join(map(str, torch.randint(10, (length,), generator=draw).tolist()))

    def said(role: str) -> dict[str, str]:
        return {"role": role, "content": digits()}

    turn = [said("user"), said("assistant")]
    return {
        "sft chat": [
            {"messages": [*turn, said("user"), said("assistant")][: 2 + 2 * (place % 2)]} for place in range(EXAMPLES)
        ],
        "sft text": [{"prompt": f"{digits()}=", "completion": digits()} for _ in range(EXAMPLES)],
        "sft completion": [
            {"prompt": [*turn, said("user")], "completion": [said("assistant")]} for _ in range(EXAMPLES)
        ],
    }


def base_in(directory: Path) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    tiny_model(0).save_pretrained(directory)
    return str(directory)


def our_sft(model: str, rows: list[dict[str, Any]]) -> tuple[float, list[torch.Tensor]]:
    config = TrainerConfig(
        model=model,
        task="copy",
        device="cpu",
        learning_rate=1e-3,
        warmup_steps=0,
        minibatches=1,
        audit_share=0.0,
        tokens_per_micro_batch=100,
    )
    tuner = Tuner(config)
    optimizer = Recorded(tuner.model.parameters(), "float32", lr=0.0, weight_decay=0.0)
    tuner._update._at = replace(tuner._update._at, optimizer=optimizer)
    loss = tuner.learn([tuner.row(msgspec.convert(row, Example), {}) for row in rows])
    return loss, [max(1.0, tuner._update.alarms.state.norms[-1]) * one for one in optimizer.gradient]


def their_sft(model: str, rows: list[dict[str, Any]], directory: Path) -> tuple[float, list[torch.Tensor]]:
    config = SFTConfig(
        output_dir=str(directory),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=len(rows),
        gradient_checkpointing=False,
        assistant_only_loss="messages" in rows[0],
    )
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = SFTTrainer(
        model=tiny_model(0), args=config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    batches, tokens = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, CPU)
    loss = trainer.compute_loss(trainer.model.train(), batches[0], num_items_in_batch=tokens)
    loss.backward()
    return float(loss.detach()), [p.grad for p in trainer.model.parameters()]


def padded(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    groups = batch(torch.Generator().manual_seed(arguments.seed))
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        for name, (rules, options) in CASES.items():
            learning = TrainerConfig(longest_completion=LONGEST, **rules)
            found[name] = compared(name, ours(groups, learning), theirs(rows_of(groups, learning), options, directory))
        model = base_in(directory / "model")
        for name, rows in examples(torch.Generator().manual_seed(arguments.seed)).items():
            found[name] = compared(name, our_sft(model, rows), their_sft(model, rows, directory))
    if arguments.json:
        print(json.dumps(found))


def compared(
    name: str, own: tuple[float, list[torch.Tensor]], peer: tuple[float, list[torch.Tensor]]
) -> dict[str, float]:
    (loss, gradient), (peer_loss, peer_gradient) = own, peer
    largest = max(float(one.abs().max()) for one in peer_gradient)
    apart = max(float((a - b).abs().max()) for a, b in zip(gradient, peer_gradient, strict=True)) / largest
    print(f"{name:14} loss {loss:+.7f}  TRL {peer_loss:+.7f}  gradients {apart:.1e} apart")
    return {"loss": loss, "trl_loss": peer_loss, "gradient_apart": apart}


if __name__ == "__main__":
    main()

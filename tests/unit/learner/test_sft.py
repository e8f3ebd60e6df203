"""Supervised training on examples: what counts of each, the loss beside transformers' own, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, models
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swarm.cli.run import sft as command
from swarm.errors import UserError
from swarm.learner import sft
from swarm.learner.batch import Row
from swarm.learner.messages import TrainerConfig
from swarm.learner.sft import Example, Tuner, train
from swarm.learner.tiny import tiny_model, tiny_tokenizer
from swarm.settings import LeadConfig

TEMPLATE = (
    "{% for message in messages %}{{ message.content }}"
    "{{ '<eos>' if message.role == 'assistant' else '=' }}{% endfor %}"
)
FORGETS = TEMPLATE.replace(
    "message.content", "('0' if message.role == 'assistant' and not loop.last else message.content)"
)
"""Leaves out what was said before, as some do with thoughts."""

CHAT = '{"messages": [{"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}]}'
LONG = [
    {"role": "user", "content": "12"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "4"},
    {"role": "assistant", "content": "56"},
]
EXAMPLES = {
    "chat": [Example(messages=LONG), Example(messages=LONG[:2]), Example(prompt=LONG[:3], completion=LONG[3:])],
    "text": [Example(prompt="31=", completion="1357"), Example(prompt="4=", completion="4")],
}


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=14,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        eos_token_id=2,
    )
    untyped: Any = LlamaForCausalLM
    return untyped(config)


FAMILIES = {"qwen3": tiny_model, "llama": llama}


def model_in(directory: Path, family: str = "qwen3", template: str | None = TEMPLATE, tokenizer: Any = None) -> str:
    tokenizer = tokenizer or tiny_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    FAMILIES[family](0).save_pretrained(directory)
    return str(directory)


def tuner_of(model: str, **given: Any) -> Tuner:
    own = {"task": "copy", "device": "cpu", "minibatches": 1}
    rate = {"learning_rate": 1e-3, "warmup_steps": 0, "audit_share": 0.0}
    return Tuner(TrainerConfig.model_validate({"model": model, **own, **rate, **given}))


def plain_loss(model: Any, rows: list[Row]) -> tuple[float, torch.Tensor]:
    """What transformers makes of labels, padded on the right, and the norm of its gradient."""
    labels = [torch.full_like(row.token_ids, -100) for row in rows]
    for label, row in zip(labels, rows, strict=True):
        label[row.places] = row.token_ids[row.places]
    loss = model(
        input_ids=pad_sequence([row.token_ids for row in rows], batch_first=True),
        attention_mask=pad_sequence([torch.ones_like(row.token_ids) for row in rows], batch_first=True),
        labels=pad_sequence(labels, batch_first=True, padding_value=-100),
    ).loss
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return float(loss.detach()), torch.stack([one.norm() for one in torch.autograd.grad(loss, trained)]).norm()


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_that_of_transformers(family: str, packing: bool, rank: int | None, tmp_path: Path) -> None:
    # Of 16 tokens at a time: the mean is over all tokens of a step however it is cut.
    tuner = tuner_of(model_in(tmp_path, family), adapter=rank, packing=packing, tokens_per_micro_batch=16)
    for examples in EXAMPLES.values():
        rows = [tuner.row(example, {}) for example in examples]
        expected, norm = plain_loss(tuner.model, rows)
        assert tuner.loss(rows, batch=2) == pytest.approx(expected, abs=1e-6)
        assert tuner.learn(rows) == pytest.approx(expected, abs=1e-6)
        assert tuner._update.alarms.state.norms[-1] == pytest.approx(float(norm), rel=1e-4)


def test_what_counts_is_what_the_model_is_to_say(tmp_path: Path) -> None:
    tuner = tuner_of(model_in(tmp_path))
    begin, end, equals = 1, 2, 13
    whole = tuner.row(Example(messages=LONG), {})
    assert whole.token_ids.tolist() == [4, 5, equals, 6, end, 7, equals, 8, 9, end]
    assert whole.places.tolist() == [3, 4, 7, 8, 9]
    last = tuner.row(Example(prompt=LONG[:3], completion=LONG[3:]), {})
    assert last.token_ids.equal(whole.token_ids)
    assert last.places.tolist() == [7, 8, 9]
    for completion in ("13", "13<eos>"):
        text = tuner.row(Example(prompt="31=", completion=completion), {})
        assert text.token_ids.tolist() == [begin, 6, 4, equals, 4, 6, end]
        assert text.places.tolist() == [4, 5, 6]


def test_an_answer_that_the_template_writes_otherwise_later_is_refused_but_in_a_prompt(tmp_path: Path) -> None:
    tuner = tuner_of(model_in(tmp_path, template=FORGETS))
    with pytest.raises(UserError, match="writes an answer otherwise where the chat goes on"):
        tuner.row(Example(messages=LONG), {})
    row = tuner.row(Example(prompt=LONG[:3], completion=LONG[3:]), {})
    assert row.token_ids[row.places].tolist() == [8, 9, 2]


def test_a_token_on_both_sides_of_a_prompts_end_is_refused(tmp_path: Path) -> None:
    core = Tokenizer(models.BPE({"<eos>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    core.enable_truncation(2)  # Which a saved tokenizer may ask for
    make: Any = PreTrainedTokenizerFast  # Annotated in part only
    tuner = tuner_of(model_in(tmp_path, tokenizer=make(tokenizer_object=core, eos_token="<eos>")))
    assert tuner.row(Example(prompt="ab", completion="b"), {}).token_ids.tolist() == [3, 2, 0]
    with pytest.raises(UserError, match="a token spans the prompt and the answer"):
        tuner.row(Example(prompt="a", completion="b"), {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Input data was truncated"),
        ('{"prompt": "1="}', "both text, or both messages"),
        ('{"question": "1=", "answer": "1"}', "it has neither messages"),
        ('{"messages": [{"role": "user", "content": "12"}]}', "the assistant's among them"),
        ('{"messages": [{"role": "assistant"}]}', "it has neither messages"),
        ('{"messages": [{"role": "assistant", "content": "1", "tool_calls": []}]}', "Expected `str`, got `array`"),
        (CHAT[:-1] + ', "tools": []}', r"Expected `null`, got `array` - at `\$.tools`"),
        (json.dumps({"prompt": "1=", "completion": "1" * 200}), "it has 204 tokens of at most 128"),
        ('{"prompt": "\udcff", "completion": "1"}', "can't decode byte 0xff"),
    ],
)
def test_a_line_that_is_no_example_is_named(line: str, said: str, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(f"{CHAT}\n\n{line}\n".encode(errors="surrogateescape"))
    config = LeadConfig(model=model_in(tmp_path / "model"), task="copy")
    with pytest.raises(UserError, match=rf"^{re.escape(str(data))}:3: [^\n]*{said}"):
        train(config, data, tmp_path / "work")


def test_a_chat_without_a_template_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(CHAT + "\n")
    config = LeadConfig(model=model_in(tmp_path / "model", template=None), task="copy")
    with pytest.raises(UserError, match=r"data.jsonl:1: the model's chat template refuses it: [^\n]+$"):
        train(config, tmp_path / "data.jsonl", tmp_path / "work")


# -- a whole training --------------------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    rows = ({"prompt": f"{number}=", "completion": str(number)[::-1]} for number in range(1000, 1060))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(data: Path, to: Path, **given: Any) -> None:
    options: dict[str, Any] = {"model": None, "adapter": None, "merge": False, "config": None}
    rate = {"steps": 8, "batch": 16, "learning_rate": 3e-3}
    command(data, to, **{**options, **rate, **given})


def weights(directory: Path) -> list[torch.Tensor]:
    return list(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).state_dict().values())


def test_a_model_is_written_that_anybody_loads_and_that_knows_more(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(data, tmp_path / "to", model=model_in(tmp_path / "model"), steps=20)
    assert AutoTokenizer.from_pretrained(tmp_path / "to").chat_template == TEMPLATE
    before, after = map(
        float, re.findall(r"(?:held out, with a|held-out) loss(?: of)? (\d+\.\d+)", capsys.readouterr().out)
    )
    assert after < before - 0.5
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "to", dtype=torch.float32)
    row = tuner_of("tiny").row(Example(prompt="1001=", completion="1001"), {})
    assert plain_loss(model, [row])[0] < before - 0.5
    assert not (tmp_path / "to.sft").exists()


def test_one_that_was_killed_goes_on_to_the_same_weights(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text('[run]\ncheckpoint_every_steps = 3\n[learn]\nschedule = "linear"\n')
    run(data, tmp_path / "whole", config=settings)
    learn, begun = Tuner.learn, list[int]()

    def watched(self: Tuner, rows: list[Row]) -> float:
        begun.append(self.steps_taken)
        if begun == [*range(6)]:
            raise KeyboardInterrupt
        return learn(self, rows)

    monkeypatch.setattr(sft.Tuner, "learn", watched)
    with pytest.raises(KeyboardInterrupt):
        run(data, tmp_path / "cut", config=settings)
    assert [path.name for path in (tmp_path / "cut.sft/checkpoints").iterdir() if path.is_dir()] == ["step-000003"]
    with pytest.raises(UserError, match="holds a training with other examples or settings"):
        run(data, tmp_path / "cut", config=settings, learning_rate=1e-3)
    # To the files of a run that was not cut, the steps before the checkpoint are not taken again.
    run(data, tmp_path / "cut", config=settings)
    assert begun == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7]
    for one, other in zip(weights(tmp_path / "whole"), weights(tmp_path / "cut"), strict=True):
        assert torch.equal(one, other)


def test_an_adapter_is_written_alone_or_merged(data: Path, tmp_path: Path) -> None:
    model = model_in(tmp_path / "model")
    run(data, tmp_path / "alone", model=model, adapter=4)
    run(data, tmp_path / "merged", model=model, adapter=4, merge=True)
    ids = torch.tensor([[1, 4, 3, 3, 4, 13]])
    base: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    merged: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    with torch.no_grad():
        before = base(input_ids=ids).logits
        alone = PeftModel.from_pretrained(base, tmp_path / "alone")(input_ids=ids).logits
        whole = merged(input_ids=ids).logits
    assert (alone - before).abs().max() > 0.1
    assert (whole - alone).abs().max() < 0.1


def test_a_directory_with_something_in_it_is_refused_before_anything_else(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to/file").touch()
    with pytest.raises(UserError, match="is not empty"):
        run(tmp_path / "no.jsonl", tmp_path / "to")


def test_a_file_of_too_few_examples_is_refused(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text('{"prompt": "1=", "completion": "1"}\n')
    with pytest.raises(UserError, match=r"one.jsonl has 1 examples to train on and 0 held out"):
        run(tmp_path / "one.jsonl", tmp_path / "to")

"""The model card of an exported model: what it was made from, how, and what it scores on held-out prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from swarm.files import without_directories
from swarm.learner.checkpoint.files import is_hub_name
from swarm.report.figures import Figures
from swarm.run.directory import ORIGIN
from swarm.settings import CHANGEABLE, LeadConfig
from swarm.settings_file import as_toml

ALWAYS = ("model", "task", "seed")  # Settings that are shown at their defaults too
DECIDE = ("max_staleness", "publish_every_steps", "steps", "target")
"""Settings that the weights depend on although they may change when a run is resumed."""

USE = """tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
model = AutoModelForCausalLM.from_pretrained("DIRECTORY", dtype="auto")"""
USE_ADAPTER = """tokenizer = AutoTokenizer.from_pretrained("DIRECTORY")
base = AutoModelForCausalLM.from_pretrained(BASE, dtype="auto")
model = PeftModel.from_pretrained(base, "DIRECTORY")"""
IN_NF4 = """, quantization_config=BitsAndBytesConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="bfloat16"
)"""


def model_card(found: Figures, step: int, *, alone: bool = False) -> str:
    """README.md, with front matter for the Hugging Face hub. It holds no path and no address of the run. `alone`: of an
    adapter without its base."""
    config = found.config
    four_bits = alone and config.get("base_precision") == "nf4"
    base, task = str(_origin(config).get("model") or config.get("model")), str(config.get("task"))
    lines = [
        "---",
        f"library_name: {'peft' if alone else 'transformers'}",
        "pipeline_tag: text-generation",
        *([f"base_model: {json.dumps(base)}"] if is_hub_name(base) else []),
        "tags:\n- reinforcement-learning\n- grpo\n- echo-node",
        "---",
        f"# {without_directories(base)} after reinforcement learning on {without_directories(task)}",
        "",
        "Post-trained with echo-node: one learner and samplers over a network. The weights are bf16."
        + (" This is an adapter (LoRA), to be loaded beside its base." if alone else ""),
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in _facts(found, base, task, step)),
        "",
        "## Use",
        "```python",
        *(["from peft import PeftModel"] if alone else []),
        f"from transformers import AutoModelForCausalLM, AutoTokenizer{', BitsAndBytesConfig' if four_bits else ''}",
        "",
        USE_ADAPTER.replace("BASE", json.dumps(without_directories(base)) + IN_NF4 * four_bits) if alone else USE,
        "```",
        "",
        "## Made with",
        "```sh",
        "echo-node lead --config lead.toml",
        "```",
        "where lead.toml holds what was not left at its default, addresses aside:",
        "```toml",
        as_toml(LeadConfig, dict(_settings(config))).rstrip(),
        "```",
        *_libraries(found),
    ]
    return "\n".join(lines) + "\n"


def _facts(found: Figures, base: str, task: str, step: int) -> Iterator[tuple[str, str]]:
    yield "base model", without_directories(base)
    yield "task", without_directories(task)
    if about := str(found.config.get("about") or ""):
        yield "about", about.replace("|", "/")
    yield "trained for", f"{step} learner steps"
    if origin := _origin(found.config):
        which = "the best model" if origin.get("best") else "the model"
        yield "began with", f"{which} of another run, after {origin.get('step')} learner steps of that one"
    yield "objective", str(found.config.get("objective", "grpo"))
    changes = [f"{what} after step {at:.0f}" for at, what in found.marks(("set",)) if at < step]
    if changes := [one for one in changes if one.startswith((*DECIDE, "learning_rate"))]:
        yield "changed while it ran", "; ".join(changes)
    yield "staleness of the rollouts, at most", str(found.bound)
    for name, column in found.evaluated.items():
        measured = [one for one in zip(column.steps, column.values, strict=True) if one[0] <= step]
        if measured:
            version, value = measured[-1]
            yield f"held-out {name}", f"{value:.4g} (version {version:.0f})"
    if rollouts := found.last("rollouts_accepted"):
        yield "rollouts in the whole run", f"{rollouts:.0f}"


def _origin(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Which model a fork began with; empty for other runs."""
    found = config.get(ORIGIN)
    return found if isinstance(found, dict) else {}


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The settings that the weights depend on and that are not at their defaults."""
    default = LeadConfig().model_dump(mode="json")
    for name, value in config.items():
        if name == ORIGIN:
            continue
        decides = name in DECIDE or name not in CHANGEABLE | {"beat_s"}
        if not decides or value is None or (value == default.get(name) and name not in ALWAYS):
            continue
        if name == "model":
            value = _origin(config).get("model") or value
        if name == "rewards":
            value = {without_directories(reward): weight for reward, weight in value.items()}
        yield name, without_directories(value) if name in ("model", "task") else value


def _libraries(found: Figures) -> Iterator[str]:
    known = found.ran_on.get("libraries")
    if isinstance(known, dict):
        versions = [f"{name} {version}" for name, version in known.items()]
        yield ""
        yield f"Python {found.ran_on.get('python')}, {', '.join(versions)}; trained on {found.ran_on.get('device')}."

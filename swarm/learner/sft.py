"""`echo-node sft`: trains on examples instead of rollouts, in the process of the command. Blocking."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import msgspec
import torch
from tokenizers import Tokenizer
from transformers.utils.logging import disable_progress_bar

from swarm.errors import UserError
from swarm.learner.batch import Row
from swarm.learner.checkpoint.files import checkpoint_path, digest_of, newest_whole, prune
from swarm.learner.messages import Save, TrainerConfig
from swarm.learner.objective import Objective, TokenLoss
from swarm.learner.process import trainer_config
from swarm.learner.trainer import Trainer, context_tokens_of
from swarm.process import NoParent
from swarm.settings import CHANGEABLE, LeadConfig, sections
from swarm.tasks.questions import is_held_out, permutation, read_lines
from swarm.types import Prompt
from swarm.wire import digest, encode

LIKELIHOOD = Objective(formula=lambda tokens, _: TokenLoss(loss=-tokens.logprobs, figures={}), wants_proximal=False)
ANSWER_TOKENS = 1024  # Longest completion of an example, unless max_new_tokens is set; prompts are limited as in a run
LINE_STEPS = 10  # Steps between two lines about the loss
PLAIN = {
    "temperature": 1.0,
    "audit_share": 0.0,
    "kl_weight": 0.0,
    "entropy_weight": 0.0,
    "loss_normalisation": "tokens",
}
"""Values for settings of a run that do not apply to examples."""
FIXED = {name for name, table in sections(LeadConfig).items() if table != "trainer"} - CHANGEABLE | {"steps"}
"""Settings that must not change when a training goes on from a checkpoint."""
Chat = list[dict[str, str]]


class Example(msgspec.Struct):
    """A line of the file: a chat, or a prompt and its completion. `tools` are refused: they would change the template's
    text."""

    messages: Chat = []
    prompt: str | Chat = []
    completion: str | Chat = []
    tools: None = None


class Tuner(Trainer):
    """A trainer whose steps raise the likelihood of the tokens that count in its rows."""

    def __init__(self, config: TrainerConfig, lineage: bytes = b"", *, resume: str = "") -> None:
        super().__init__(config, NoParent(), resume=resume)
        self.model, self._lineage, self._update.objective = self._model, lineage, LIKELIHOOD
        # A copy: a saved tokenizer may be set to pad or truncate.
        self._words = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
        self._words.no_padding()
        self._words.no_truncation()

    def learn(self, rows: Sequence[Row]) -> float:
        """Take an optimizer step. Return its loss, the mean over all tokens that count, in nats."""
        sums: defaultdict[str, float] = defaultdict(float)
        self._update.set_learning_rate(self.steps_taken)
        self._update.optimizer_step(rows, sums, is_first=False)
        self.steps_taken += 1
        return sums["loss"]

    def loss(self, rows: Sequence[Row], batch: int) -> float:
        """The loss of these rows, without a step, computed for `batch` rows at a time."""
        parts = (self._update.read_all(rows[at : at + batch], self._policy) for at in range(0, len(rows), batch))
        return -float(torch.cat([*chain.from_iterable(parts)]).mean())

    def read(self, path: Path, config: LeadConfig) -> tuple[list[Row], list[Row]]:
        """The examples of a file to train on, and those held out. UserError with file and line."""
        most = min(context_tokens_of(self._model), self._longest_row())
        sides: tuple[list[Row], list[Row]] = [], []
        for number, line in filter(lambda pair: pair[1].strip(), read_lines(path)):
            try:
                row = self.row(msgspec.json.decode(line, type=Example), config.chat_arguments)
                if len(row.token_ids) > most:
                    raise UserError(f"it has {len(row.token_ids)} tokens of at most {most} (see max_new_tokens)")
            except (UserError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise UserError(f"{path}:{number}: {' '.join(str(error).split())}") from error
            question = Prompt(prompt_id="-", text=str(row.token_ids[: row.prompt_tokens].tolist()), answer="")
            sides[is_held_out(question)].append(row)
        if not all(sides):
            raise UserError(f"{path} has {len(sides[0])} examples to train on and {len(sides[1])} held out: add some")
        return sides

    def row(self, example: Example, arguments: dict[str, Any]) -> Row:
        """The row of an example. Of a completion, its tokens and the end of the text count; of a chat, the template's
        text for each message of the assistant, after the words with which the template has an answer begin. A prompt is
        tokenised alone, as when the model answers it. UserError if the whole text does not begin with these tokens."""
        prompt, completion, end = example.prompt, example.completion, self._tokenizer.eos_token or ""
        if is_text := isinstance(prompt, str) and isinstance(completion, str):
            text = prompt + completion.removesuffix(end) + end
            spans = [(prompt, text)]
        elif isinstance(prompt, str) or isinstance(completion, str):
            raise UserError("prompt and completion are both text, or both messages")
        else:
            text, spans = self._chat([*example.messages, *prompt, *completion], len(prompt), arguments)

        def encode(part: str) -> list[int]:
            return list(self._words.encode(part, add_special_tokens=is_text).ids)

        token_ids, places = encode(text), list[int]()
        for parts in spans:
            start, stop = (encode(part) for part in parts)
            if start != token_ids[: len(start)] or stop != token_ids[: len(stop)]:
                raise UserError("a token spans the prompt and the answer: end the prompt before a space, say")
            places += range(max(1, len(start)), len(stop))  # Nothing predicts the very first token
        drawn, behaviour = torch.tensor(places), torch.zeros(len(places))
        return Row(token_ids=torch.tensor(token_ids), prompt_tokens=places[0], drawn=drawn, behaviour=behaviour)

    def _chat(self, chat: Chat, first: int, arguments: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
        """A chat as text, and, for each answer from message `first` on, the text before it and the text up to its
        end."""

        def shown(count: int, *, asks: bool = False) -> str:
            given = {"tokenize": False, "add_generation_prompt": asks, **arguments}
            try:
                return str(self._tokenizer.apply_chat_template(chat[:count], **given))
            except Exception as error:  # a template is somebody else's program
                raise UserError(f"the model's chat template refuses it: {error or type(error).__name__}") from error

        answers = [at for at in range(first, len(chat)) if chat[at].get("role") == "assistant"]
        if not answers or not all("content" in message for message in chat):
            raise UserError("it has neither messages, the assistant's among them, nor a prompt and a completion")
        text, spans = shown(len(chat)), [(shown(at, asks=True), shown(at + 1)) for at in answers]
        if not all(text.startswith(part) for part in chain(*spans)):
            raise UserError(
                "the chat template writes an answer otherwise where the chat goes on: have earlier answers in the "
                "prompt, or set chat_arguments (such as enable_thinking)"
            )
        return text, spans


def train(config: LeadConfig, data: Path, work: Path) -> None:
    """Train on the examples of `data`, beginning from the newest checkpoint under `work`. The last step has one too."""
    disable_progress_bar()
    batch, seed, root = config.groups_per_step, config.seed, work / "checkpoints"
    learns = trainer_config(config, work, config.max_new_tokens or ANSWER_TOKENS).model_copy(update=PLAIN)
    lineage = digest(encode((learns.model_dump(mode="json", include=FIXED), digest_of(data).blake3)))
    newest = newest_whole(root)
    if newest is not None and newest.lineage != lineage:
        raise UserError(f"{work} holds a training with other examples or settings: remove it, or name another --to")
    tuner = Tuner(learns, lineage, resume=str(newest.path) if newest else "")
    rows, held_out = tuner.read(data, config)

    def tell(words: str, loss: float) -> None:
        print(f"step {tuner.steps_taken} of {config.steps}: {words} {loss:.4f} nats a token", flush=True)

    tell(f"{len(rows)} examples to train on; {len(held_out)} are held out, with a loss of", tuner.loss(held_out, batch))
    epochs = chain.from_iterable(permutation(len(rows), f"{seed}/{epoch}") for epoch in count())
    order = islice(epochs, tuner.steps_taken * batch, None)
    while tuner.steps_taken < config.steps:
        loss = tuner.learn([rows[place] for place in islice(order, batch)])
        done = tuner.steps_taken
        if done % LINE_STEPS == 0:
            tell("loss", loss)
        if done % config.checkpoint_every_steps == 0 or done == config.steps:
            tuner.save(Save(directory=str(checkpoint_path(root, done)), step=done))
            if fault := tuner.flush().fault:
                raise UserError(fault)
            prune(root, 1)
    tell("held-out loss", tuner.loss(held_out, batch))

"""The prompts of a run in the form that the model reads: rendered as chat or plain text, tokenized, and measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from swarm.errors import Damaged, UserError
from swarm.learner.messages import Prepared
from swarm.run.directory import write_json
from swarm.settings import LeadConfig
from swarm.tasks import DEFAULT_NEW_TOKENS, check_task, load_task, task_options
from swarm.tasks.base import Task
from swarm.tasks.chat import ChatTemplate, is_printed, load_chat_template
from swarm.tasks.turns import TurnText, completion_text
from swarm.types import MAX_TOKENS, Prompt
from swarm.wire import digest, encode

RECORD = "task.json"  # Records what a run's prompts depend on besides its configuration
CHUNK = 1000  # Prompts that are encoded at a time to measure them
LOOKED_AT = 64  # Training prompts of an endless task that are measured before the run

TOKENS_PER_BYTE = 11
"""Most tokens assumed for a byte of text: NFKC turns the three bytes of U+FDFA into 18 characters of 33 bytes, each of
which may be a token."""

ANSWER_TOKENS = 256  # Assumed of what an environment says to a turn, if neither it nor the user knows better
SPECIAL_TOKENS = 64  # More than any tokenizer puts around a text
TRIES = 64  # Prompts tried one after the other in place of one that is too long
STRIDE = 1 << 40  # Distance from a prompt's number to its replacement's: no run gets that far by itself
PROGRESS_S = 3.0  # Shortest time between two lines about progress
PADDING_SHARE, PADDING_TOKENS = 0.05, 1024
"""A model's vocabulary is often padded to a round number. Padding stays below at least one of these: Qwen3's 151,936
for 151,669 tokens is 0.2 %, DeepSeek's 102,400 for 100,015 is 2.4 %. Above both, the tokenizer is another model's."""


class ProgressLine:
    """Reports the progress of long work to `say`, at most one line every PROGRESS_S. `stop` ends the work."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said_at = time.monotonic()
        self._stopped = False

    def __call__(self, line: str) -> None:
        if self._stopped:
            raise UserError("the prompts are no longer wanted")
        if time.monotonic() - self._said_at >= PROGRESS_S:
            self._said_at = time.monotonic()
            self._say(line)

    def stop(self) -> None:
        self._stopped = True


class TaskRecord(msgspec.Struct, frozen=True):
    """What a run's prompts depend on. `data_digest` comes from the task, and no prompt exceeds `most_tokens`. Templates
    that ask for the date get the time when the run `began`. A completion that ended by itself ends with one of
    `stop_token_ids`. `asked` and `weights` are digests of some prompts' tokens and of the model that it began with."""

    data_digest: str
    most_tokens: int
    began: datetime
    stop_token_ids: tuple[int, ...] = ()
    asked: str = ""
    weights: str = ""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Training prompts by number and held-out prompts, with token ids. `template` is None if the model reads prompts as
    they are. `turns` are an environment's words."""

    task: Task
    tokenizer: Any
    template: ChatTemplate | None
    record: TaskRecord
    system_prompt: str | None = None
    turns: TurnText | None = None

    def __call__(self, number: int) -> Prompt:
        """Return training prompt `number`. If it is too long or empty, prompt number + STRIDE replaces it, and so on.
        Raise UserError after TRIES prompts."""
        for attempt in range(TRIES):
            prompt = self.encode(self.task.prompt(number + attempt * STRIDE))
            if 0 < len(prompt.token_ids) <= self.record.most_tokens:
                return prompt
        raise UserError(
            f"{TRIES} prompts of {self.task.name} in a row have no tokens or more than {self.record.most_tokens}: "
            "set another max_prompt_tokens, or --max-new-tokens with less"
        )

    def held_out(self, count: int) -> list[Prompt]:
        """Return up to `count` held-out prompts. Raise UserError with the id of one that is too long or empty."""
        prompts = [self.encode(prompt) for prompt in self.task.held_out(count)]
        for prompt in prompts:
            self._check_length(prompt, len(prompt.token_ids))
        return prompts

    def encode(self, prompt: Prompt) -> Prompt:
        """Return `prompt` with token ids. The tokenizer decides about a BOS in plain text, the template in a chat."""
        if self.turns is not None and prompt.messages:
            return msgspec.structs.replace(prompt, token_ids=tuple(self.turns.opening(prompt.messages)))
        encoded = self.tokenizer.encode(self.text(prompt), add_special_tokens=self.template is None)
        # Some tokenizers put an end after every text; the answer would begin behind it.
        length = len(encoded.ids) - sum(takewhile(bool, reversed(encoded.special_tokens_mask)))
        return msgspec.structs.replace(prompt, token_ids=tuple(encoded.ids[:length]))

    def boards(self, prompt: Prompt, said: Sequence[str]) -> list[str]:
        """Return the board after each turn of an episode, for people; none where its messages show it."""
        player = self.task.player
        if player is None or not prompt.messages or player.seats > 1:
            return []
        environment = self.task.environment()
        environment.reset(int(prompt.prompt_id.rpartition("-")[2]))
        return [environment.board() for text in said if environment.step(text)] if environment.board() else []

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a completion or of a part of one, as rewards read it."""
        return completion_text(self.tokenizer, token_ids, self.record.stop_token_ids)

    def text(self, prompt: Prompt) -> str:
        """Return the text that the model reads. Raise UserError with the prompt's id for a chat without a template, or
        if the template refuses it."""
        if self.template is None:
            if self.turns is not None and prompt.messages:
                return "".join(content for _, content in prompt.messages)
            if prompt.messages:
                raise UserError(
                    f"the prompt {prompt.prompt_id} is a chat, which needs a chat template: take a model that has one "
                    "(an instruct or chat model), or write the prompts as plain text"
                )
            return prompt.text
        messages = prompt.messages or (("user", prompt.text),)
        if self.system_prompt is not None and messages[0][0] != "system":
            messages = (("system", self.system_prompt), *messages)
        try:
            text = self.template.render(messages)
        except UserError as error:
            raise UserError(f"the prompt {prompt.prompt_id}: {error}") from error
        if not is_printed(messages, text):
            roles = " and ".join(role for role, content in messages if not is_printed([(role, content)], text))
            raise UserError(
                f"the model's chat template does not print what the {roles} of the prompt {prompt.prompt_id} says: "
                "take another template, --no-chat, or leave that message out"
            )
        return text

    def check_lengths(self) -> None:
        """Measure every training prompt of a data set, or LOOKED_AT prompts of an endless task. This blocks, and takes
        long for a large data set. Raise UserError with the id of a prompt that is too long or empty."""
        count = LOOKED_AT if self.task.size is None else self.task.size
        for first in range(0, count, CHUNK):
            texts: list[tuple[Prompt, str]] = []
            for number in range(first, min(first + CHUNK, count)):
                self.task.progress(f"{self.task.name}: measured {number:,} of {count:,} prompts")
                prompt = self.task.prompt(number)
                if not self._is_short(text := self.text(prompt)):
                    texts.append((prompt, text))
            found = self.tokenizer.encode_batch([text for _, text in texts], add_special_tokens=self.template is None)
            for (prompt, _), encoded in zip(texts, found, strict=True):
                self._check_length(prompt, len(encoded.ids))

    def _is_short(self, text: str) -> bool:
        """Return whether the number of bytes proves that `text` is short enough. Most prompts need no tokenizer."""
        return bool(text) and len(text.encode()) * TOKENS_PER_BYTE + SPECIAL_TOKENS <= self.record.most_tokens

    def _check_length(self, prompt: Prompt, length: int) -> None:
        if length == 0:
            raise UserError(f"the prompt {prompt.prompt_id} has no tokens: the tokenizer knows none of its text")
        if length > (most := self.record.most_tokens):
            raise UserError(
                f"the prompt {prompt.prompt_id} has {length} tokens; the most is {most} (max_prompt_tokens or the "
                "model's context less --max-new-tokens, of episodes less --max-episode-tokens): leave it out or "
                "change these"
            )


def open_task(config: LeadConfig, progress: ProgressLine | None = None) -> Task:
    """Return the run's task with its data read. Raise UserError if it does not exist, is broken or is empty."""
    task = load_task(task_options(config))
    if progress is not None:
        task.progress = progress
    check_task(task)
    return task


def longest_turn(config: LeadConfig, task: Task) -> int:
    """Return the longest completion or turn in tokens, as the user or else the task sets it."""
    return config.max_new_tokens or task.max_new_tokens or DEFAULT_NEW_TOKENS


def longest_completion(config: LeadConfig, task: Task, context_tokens: int = MAX_TOKENS) -> int:
    """Return the longest rollout in tokens: a completion, or an episode with what its environment says. What is assumed
    of an episode leaves a quarter of the model's context for the prompt, and a program room for several streams."""
    turn = longest_turn(config, task)
    if (environment := task.player) is None:
        return turn
    turns = config.max_turns or environment.max_turns
    return (
        config.max_episode_tokens
        or environment.max_tokens
        or min(context_tokens * 3 // 4, turns * (turn + ANSWER_TOKENS), MAX_TOKENS // (4 if task.is_external else 1))
    )


def open_tokenizer(model: str, files_dir: Path) -> Any:
    """Return the fast tokenizer in `files_dir`. Raise UserError if it is missing or damaged."""
    path = files_dir / "tokenizer.json"
    if not path.is_file():
        raise UserError(f"the model {model!r} has no tokenizer.json: save its fast tokenizer in the same directory")
    try:
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(path))
    except Exception as error:  # The library raises nothing narrower
        why = " ".join(str(error).split())
        raise UserError(f"{path} is no tokenizer ({why}): save the model's fast tokenizer there again") from error
    # A saved tokenizer may be set to pad or truncate.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def open_prompts(
    config: LeadConfig, task: Task, files_dir: Path, record: TaskRecord, say: Callable[[str], None]
) -> Prompts:
    """Return the prompts for the model whose small files are in `files_dir`. Raise UserError if the settings need a
    chat template and the model has none, or if a system prompt has no chat."""
    tokenizer = open_tokenizer(config.model, files_dir)
    template = load_chat_template(files_dir, began=record.began, arguments=config.chat_arguments)
    chat = task.chat if config.chat is None else config.chat
    if template is None and (config.chat or (chat and config.system_prompt is not None)):
        wanted = "chat" if config.chat else "--system-prompt"
        raise UserError(
            f"{wanted} needs a chat template, and the model {config.model!r} has none: take an instruct or chat model, "
            f"or leave {wanted} out"
        )
    if config.system_prompt is not None and not chat:
        raise UserError(f"the prompts of {config.task} are given to the model as they are: leave --system-prompt out")
    if chat and template is None:
        say("the model has no chat template: it is given the prompts as they are")
    turns = None
    if task.player is not None:
        turns = TurnText(tokenizer, template if chat else None, record.stop_token_ids, config.system_prompt)
    return Prompts(
        task=task,
        tokenizer=tokenizer,
        turns=turns,
        template=template if chat else None,
        record=record,
        system_prompt=config.system_prompt,
    )


def most_prompt_tokens(config: LeadConfig, task: Task, context_tokens: int) -> int:
    """Return the length of the longest prompt that leaves room for the longest completion, in tokens. Raise UserError
    if there is no room for any."""
    longest = longest_completion(config, task, context_tokens)
    room = context_tokens - longest
    if room < 1:
        raise UserError(
            f"--max-new-tokens {longest} leaves no room for a prompt: the model's context has {context_tokens} tokens "
            "(of an episode, --max-episode-tokens counts)"
        )
    return min(room, config.max_prompt_tokens or room)


def check_vocabulary(model: str, files_dir: Path, vocab_size: int) -> str:
    """Return a line for the user about padding, or "". Raise UserError if the tokenizer is another model's."""
    tokens = max(open_tokenizer(model, files_dir).get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if tokens > vocab_size:
        raise UserError(
            f"the tokenizer has {tokens:,} tokens and the model's vocabulary {vocab_size:,}: it is another model's, or "
            "tokens were added without resizing the model's embeddings"
        )
    spare = vocab_size - tokens
    if spare > max(PADDING_SHARE * vocab_size, PADDING_TOKENS):
        raise UserError(
            f"the model's vocabulary has {vocab_size:,} entries and the tokenizer only {tokens:,} tokens: it is "
            "another model's; save the right one in the model's directory"
        )
    return f"the model's vocabulary has {spare:,} entries more than the tokenizer: padding" if spare else ""


def prepare_prompts(
    run_dir: Path,
    config: LeadConfig,
    task: Task,
    prepared: Prepared,
    say: Callable[[str], None],
    progress: ProgressLine | None = None,
) -> tuple[Prompts, list[Prompt]]:
    """Return a run's measured training and held-out prompts, and record what they depend on. Blocking. Raise UserError
    if no run can begin with them."""
    files_dir = run_dir / "model"
    task.progress = progress or ProgressLine(say)
    if line := check_vocabulary(config.model, files_dir, prepared.vocab_size):
        say(line)
    record = read_record(run_dir) or TaskRecord(
        data_digest=task.data_digest,
        most_tokens=most_prompt_tokens(config, task, prepared.context_tokens),
        began=datetime.now().replace(microsecond=0),
        stop_token_ids=prepared.stop_token_ids,
    )
    prompts = open_prompts(config, task, files_dir, record, say)
    prompts.check_lengths()
    if prompts.turns is not None and (line := prompts.turns.check(task.prompt(0).messages)):
        say(line)
    held_out = prompts.held_out(config.eval_prompts)
    asked = digest(encode([prompt.token_ids for prompt in held_out[:16]])).hex()
    former = (record.asked, asked, "chat template or tokenizer"), (record.weights, prepared.weights, "weights")
    if other := [what for before, now, what in former if before not in ("", now)]:
        raise UserError(
            f"the model {config.model} has another {other[0]} than when the run began, and what was drawn then would "
            "be trained on as of now: put the former back (--model says where it is), or begin a new run"
        )
    record = msgspec.structs.replace(record, asked=asked, weights=prepared.weights)
    write_json(run_dir / RECORD, msgspec.to_builtins(record))
    return prompts, held_out


# -- the record of what a run's prompts depend on ------------------------------------------------------------


def read_record(run_dir: Path) -> TaskRecord | None:
    """Return the record from the run's beginning, or None if there is no record. Raise Damaged if it cannot be read."""
    try:
        return msgspec.json.decode((run_dir / RECORD).read_bytes(), type=TaskRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(run_dir, RECORD, error) from error


def check_data(run_dir: Path, task: Task) -> None:
    """Raise UserError if the task's data have changed since the run in `run_dir` began."""
    record = read_record(run_dir)
    if record is not None and record.data_digest != task.data_digest:
        raise UserError(
            f"the data of {task.name} have changed since the run in {run_dir} began: put the former back, or begin a "
            "new run"
        )

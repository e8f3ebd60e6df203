"""A run's prompts as token ids: with a chat template and without, measured before the run, on record for the next."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from swarm.broadcast.version.manifest import Layout
from swarm.environments.frozen_lake import FrozenLake
from swarm.errors import UserError
from swarm.learner.messages import Prepared
from swarm.run.directory import named_after
from swarm.run.prompts import (
    STRIDE,
    ProgressLine,
    Prompts,
    TaskRecord,
    check_data,
    check_vocabulary,
    longest_completion,
    most_prompt_tokens,
    open_prompts,
    open_task,
    prepare_prompts,
    read_record,
)
from swarm.settings import LeadConfig
from swarm.tasks.base import Task
from swarm.tasks.turns import NOTED
from swarm.types import Prompt, Score

BOS = "<s>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}({{ m.content }}){% endfor %}a("
CONTEXT = 128

CALCULATOR = "python:examples.environments.tools:Calculator"


class Letters(Task):
    """Prompt i is `i % 10` letters long, and no end of them."""

    name, description, max_new_tokens = "letters", "letters", None

    def prompt(self, index: int) -> Prompt:
        return Prompt(prompt_id=f"l{index}", text="x" * (1 + index % 10), answer="")

    def held_out(self, count: int) -> Sequence[Prompt]:
        return [Prompt(prompt_id="h", text="yy", answer="")]

    def score(self, prompt: Prompt, completion: str) -> Score:
        return Score(reward=0.0, exact=False)


def _letters(tokenizer: Any, most_tokens: int) -> Prompts:
    record = TaskRecord(data_digest="", most_tokens=most_tokens, began=datetime.now())
    return Prompts(Letters(), tokenizer, None, record)


def _characters(directory: Path) -> Any:
    """One token a character, and a BOS before a text."""
    words = {word: at for at, word in enumerate((BOS, "?", *map(chr, range(32, 127))))}
    tokenizer: Any = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    tokenizer.add_special_tokens([BOS])
    # As a tokenizer that was trained with: prompts must not be padded or cut.
    tokenizer.enable_padding(length=50)
    tokenizer.enable_truncation(4)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return tokenizer


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    _characters(tmp_path / "run" / "model")
    return tmp_path / "run"


@pytest.fixture
def template(run_dir: Path) -> None:
    (run_dir / "model" / "chat_template.jinja").write_text(TEMPLATE)
    (run_dir / "model" / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "held_out": n % 5 == 0} for n in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _config(path: Path, **settings: Any) -> LeadConfig:
    return LeadConfig(**{"task": f"jsonl:{path}", "max_new_tokens": 8, **settings})


def _prepared(**changes: Any) -> Prepared:
    sizes = {"parameters": 1, "trained": 1, "vocab_size": 97, "context_tokens": CONTEXT}
    facts = {"layout": Layout(tensors=(), files=()), "stop_token_ids": (), "device": "cpu"}
    return Prepared(**{**sizes, **facts, **changes})


def _open(run_dir: Path, config: LeadConfig) -> tuple[Prompts, list[Prompt], list[str]]:
    said: list[str] = []
    prompts, held_out = prepare_prompts(run_dir, config, open_task(config), _prepared(), said.append)
    return prompts, held_out, said


def _recorded(run_dir: Path) -> TaskRecord:
    record = read_record(run_dir)
    assert record is not None
    return record


def _decoded(run_dir: Path, prompt: Prompt) -> str:
    tokenizer: Any = Tokenizer.from_file(str(run_dir / "model" / "tokenizer.json"))
    return "".join(tokenizer.id_to_token(number) for number in prompt.token_ids)


def test_a_completion_is_decoded_as_rewards_read_it_now_and_from_the_record(run_dir: Path) -> None:
    """Without the stop token at its end; another special token stays. The record is what reports and exports have."""
    stop = 3
    config = LeadConfig(max_new_tokens=8)
    task = open_task(config)
    prompts, _ = prepare_prompts(run_dir, config, task, _prepared(stop_token_ids=(stop,)), lambda line: None)
    record = _recorded(run_dir)
    for one in (prompts, open_prompts(config, task, run_dir / "model", record, lambda line: None)):
        assert [one.decode(drawn) for drawn in ([20, stop], [20, 0, stop], [stop, 20])] == ["2", "2 <s>", "! 2"]


class Slow(Letters):
    def held_out(self, count: int) -> Sequence[Prompt]:
        self.progress("slow: 0 of 1 held-out questions found among 7")
        return super().held_out(count)


def test_long_work_tells_how_far_it_is_and_ends_if_unwanted(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    config = LeadConfig(max_new_tokens=8)
    prepare_prompts(run_dir, config, Slow(), _prepared(), said.append)
    assert said == [], "what is soon done is not told"
    monkeypatch.setattr("swarm.run.prompts.PROGRESS_S", 0.0)
    prepare_prompts(run_dir, config, Slow(), _prepared(), said.append)
    assert said == [
        *(f"letters: measured {number} of 64 prompts" for number in range(64)),
        "slow: 0 of 1 held-out questions found among 7",
    ]
    stopped = ProgressLine(said.append)
    stopped.stop()
    with pytest.raises(UserError, match="the prompts are no longer wanted"):
        prepare_prompts(run_dir, config, Slow(), _prepared(), said.append, stopped)


def test_without_a_template_a_prompt_is_the_text_with_the_tokenizers_bos(run_dir: Path, sums: Path) -> None:
    prompts, held_out, said = _open(run_dir, _config(sums))
    assert [_decoded(run_dir, one) for one in (prompts(0), *held_out)] == [
        BOS + one.text for one in (prompts(0), *held_out)
    ]
    assert said == ["the model has no chat template: it is given the prompts as they are"]


def test_a_prompt_ends_where_the_answer_begins(run_dir: Path, sums: Path) -> None:
    """Some tokenizers put an end after every text."""
    tokenizer = _characters(run_dir / "model")
    ends_twice = processors.TemplateProcessing(single=f"{BOS} $A {BOS} {BOS}", special_tokens=[(BOS, 0)])
    tokenizer.post_processor = ends_twice
    tokenizer.save(str(run_dir / "model" / "tokenizer.json"))
    prompts, _, _ = _open(run_dir, _config(sums))
    assert _decoded(run_dir, prompts(0)) == BOS + prompts(0).text


@pytest.mark.usefixtures("template")
def test_with_a_template_a_prompt_is_a_chat_and_its_bos_is_not_doubled(run_dir: Path, sums: Path) -> None:
    prompts, held_out, said = _open(run_dir, _config(sums, system_prompt="Go."))
    assert _decoded(run_dir, prompts(0)) == f"{BOS}s(Go.)u({prompts(0).text})a("
    assert _decoded(run_dir, held_out[0]) == f"{BOS}s(Go.)u({held_out[0].text})a("
    chat = Prompt(prompt_id="c", text="b", answer="", messages=(("system", "Mine."), ("user", "b")))
    assert prompts.text(chat) == f"{BOS}s(Mine.)u(b)a(", "a system message of its own goes before the settings'"
    assert said == []


@pytest.mark.usefixtures("template")
@pytest.mark.parametrize(
    ("settings", "text"),
    [({"chat": False}, "{}"), ({"task": "copy"}, "{}"), ({"task": "copy", "chat": True}, "u({})a("), ({}, "u({})a(")],
)
def test_chat_is_for_questions_unless_it_is_set(run_dir: Path, sums: Path, settings: dict[str, Any], text: str) -> None:
    prompts, _, _ = _open(run_dir, _config(sums, **settings))
    assert _decoded(run_dir, prompts(0)) == BOS + text.format(prompts(0).text)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "the prompt talk is a chat, which needs a chat template"),
        ({"chat": True}, "chat needs a chat template, and the model .* has none"),
        ({"system_prompt": "Go."}, "--system-prompt needs a chat template"),
        ({"task": "copy", "system_prompt": "Go."}, "given to the model as they are: leave --system-prompt out"),
    ],
)
def test_a_chat_without_a_template_is_one_line(run_dir: Path, sums: Path, settings: dict[str, Any], words: str) -> None:
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    if not settings:
        sums.write_text(sums.read_text() + json.dumps({"id": "talk", "prompt": turns, "answer": "c"}) + "\n")
    with pytest.raises(UserError, match=words):
        _open(run_dir, _config(sums, **settings))


def test_a_prompt_counts_as_short_only_if_no_tokenizer_could_make_it_long() -> None:
    """U+FDFA, three bytes, becomes 18 letters of 33 bytes: the longest of what a normaliser makes of a character."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer: Any = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.normalizer = normalizers.NFKC()
    text = "\ufdfa" * 10
    long = len(tokenizer.encode(text).ids)
    assert long == 331
    assert not _letters(tokenizer, long - 1)._is_short(text)
    assert _letters(tokenizer, 11 * 30 + 64)._is_short(text)


def test_every_question_is_measured_before_the_run(run_dir: Path, sums: Path) -> None:
    long = json.dumps({"id": "much", "prompt": "1" * (CONTEXT - 8), "answer": "a"}) + "\n"
    sums.write_text(sums.read_text() + long)
    with pytest.raises(UserError, match=rf"the prompt much has {CONTEXT - 7} tokens; the most is {CONTEXT - 8} "):
        _open(run_dir, _config(sums))
    assert read_record(run_dir) is None


def test_the_user_may_set_a_lower_limit(run_dir: Path, sums: Path) -> None:
    with pytest.raises(UserError, match=f"--max-new-tokens {CONTEXT} leaves no room for a prompt"):
        _open(run_dir, _config(sums, max_new_tokens=CONTEXT))
    with pytest.raises(UserError, match=r"has [56] tokens; the most is 4 \(max_prompt_tokens or "):
        _open(run_dir, _config(sums, max_prompt_tokens=4))
    assert _open(run_dir, _config(sums, max_prompt_tokens=6))[0].record.most_tokens == 6


def test_of_a_task_without_end_a_long_prompt_gives_way_to_another(tmp_path: Path) -> None:
    tokenizer: Any = _characters(tmp_path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    prompts = _letters(tokenizer, 8)
    assert prompts(3).prompt_id == "l3"
    # It would have a BOS and 9 letters; the one in its place has 5.
    assert prompts(8).prompt_id == f"l{8 + STRIDE}"
    assert prompts(8) == prompts(8)
    for known, most_tokens in ((tokenizer, 0), (Tokenizer(models.BPE()), 8)):
        with pytest.raises(UserError, match=f"in a row have no tokens or more than {most_tokens}"):
            _letters(known, most_tokens)(0)
    with pytest.raises(UserError, match="the prompt l7 has 9 tokens; the most is 8"):
        prompts.check_lengths()


@pytest.mark.parametrize(
    ("task", "settings", "context", "longest"),
    [
        ("copy", {}, CONTEXT, 6),
        ("jsonl", {"max_new_tokens": 8}, CONTEXT, 8),
        ("jsonl", {}, 4096, 1024),
        ("frozen-lake", {}, 4096, 72),
        ("frozen-lake", {"max_episode_tokens": 20}, 4096, 20),
        (CALCULATOR, {}, 1 << 20, 8 * (512 + 256)),
        (CALCULATOR, {"max_turns": 3, "max_new_tokens": 10}, 1 << 20, 3 * (10 + 256)),
        (CALCULATOR, {}, 4096, 3072),
    ],
)
def test_the_longest_completion(sums: Path, task: str, settings: dict[str, Any], context: int, longest: int) -> None:
    config = LeadConfig(task=f"jsonl:{sums}" if task == "jsonl" else task, **settings)
    assert longest_completion(config, open_task(config), context) == longest
    assert most_prompt_tokens(config, open_task(config), context) == context - longest


def _open_lake(run_dir: Path, **settings: Any) -> tuple[Prompts, list[str]]:
    said: list[str] = []
    config = LeadConfig(task="frozen-lake", eval_prompts=1, **settings)
    prompts, _ = prepare_prompts(run_dir, config, open_task(config), _prepared(context_tokens=4096), said.append)
    return prompts, said


@pytest.mark.usefixtures("template")
def test_a_template_that_rewrites_earlier_turns_is_for_no_episodes(run_dir: Path) -> None:
    """And one that drops earlier thoughts is told."""
    (run_dir / "model" / "chat_template.jinja").write_text(TEMPLATE.replace("messages", "messages[-2:]"))
    with pytest.raises(UserError, match=r"chat_arguments .* or pass --no-chat"):
        _open_lake(run_dir, chat=True)
    assert read_record(run_dir) is None
    assert _open_lake(run_dir)[1] == [], "it is not asked if the model reads prompts as they are"
    (run_dir / "task.json").unlink()  # Each is a run of its own
    (run_dir / "model" / "chat_template.jinja").write_text(TEMPLATE)
    assert _open_lake(run_dir, chat=True)[1] == []
    thoughtless = TEMPLATE.replace("m.content }}", "m.content.split('</think>')[-1] }}")
    (run_dir / "model" / "chat_template.jinja").write_text(thoughtless)
    assert _open_lake(run_dir, chat=True)[1] == [NOTED]


def test_a_board_is_drawn_after_each_turn_where_there_is_one(run_dir: Path) -> None:
    prompts, _ = _open_lake(run_dir)
    opening, lake = prompts(3), FrozenLake()
    lake.reset(int(opening.prompt_id.rpartition("-")[2]))
    said = ["0", "1", "2", "3", "nonsense"]
    boards = [lake.board() for one in said if lake.step(one)]
    assert len({*boards, opening.text}) > 1
    assert prompts.boards(opening, said) == boards
    assert prompts.boards(msgspec.structs.replace(opening, messages=()), said) == []
    config = LeadConfig(task=CALCULATOR)
    assert replace(prompts, task=open_task(config)).boards(opening, said) == []


def test_a_padded_vocabulary_goes_on_with_a_word_and_another_models_is_refused(run_dir: Path) -> None:
    assert check_vocabulary("m", run_dir / "model", 97) == ""
    assert "31 entries more than the tokenizer: padding" in check_vocabulary("m", run_dir / "model", 128)
    for vocab_size, words in (
        (96, "the tokenizer has 97 tokens and the model's vocabulary 96"),
        (1300, "only 97 tokens: it is another model's"),
    ):
        with pytest.raises(UserError, match=words):
            check_vocabulary("m", run_dir / "model", vocab_size)
    (run_dir / "model" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer.json"):
        _open(run_dir, LeadConfig(max_new_tokens=8))


def test_what_the_prompts_depend_on_is_on_record_and_other_data_are_refused(run_dir: Path, sums: Path) -> None:
    first, _, _ = _open(run_dir, _config(sums))
    record = _recorded(run_dir)
    assert record.most_tokens == first.record.most_tokens == CONTEXT - 8
    former = msgspec.structs.replace(record, most_tokens=3)
    assert open_prompts(_config(sums), first.task, run_dir / "model", former, print).record.most_tokens == 3
    check_data(run_dir, open_task(_config(sums)))
    sums.write_text(sums.read_text().replace("40", "41"))
    with pytest.raises(UserError, match=r"have changed since the run in .* began"):
        check_data(run_dir, open_task(_config(sums)))
    (run_dir / "task.json").write_text("{")
    with pytest.raises(UserError, match=r"task.json is damaged"):
        read_record(run_dir)


@pytest.mark.usefixtures("template")
@pytest.mark.parametrize(
    ("file", "before", "after"),
    [("chat_template.jinja", TEMPLATE, TEMPLATE + "!"), ("tokenizer.json", '"+": 13', '"+": 14'), ("", "", "")],
)
def test_a_run_does_not_go_on_with_another_base(run_dir: Path, sums: Path, file: str, before: str, after: str) -> None:
    config = _config(sums)
    prepare_prompts(run_dir, config, open_task(config), _prepared(weights="aa"), print)
    prepare_prompts(run_dir, config, open_task(config), _prepared(weights="aa"), print)
    if path := run_dir / "model" / file if file else None:
        path.write_text(path.read_text().replace(before, after))
    what = "chat template or tokenizer" if file else "weights"
    with pytest.raises(UserError, match=f"has another {what} than when the run began"):
        prepare_prompts(run_dir, config, open_task(config), _prepared(weights="aa" if file else "bb"), print)


@pytest.mark.usefixtures("template")
def test_a_resumed_run_is_told_the_day_it_began(run_dir: Path, sums: Path) -> None:
    (run_dir / "model" / "chat_template.jinja").write_text("{{ strftime_now('%Y: ') }}{{ messages[0].content }}")
    _open(run_dir, _config(sums))
    record = _recorded(run_dir)
    then = msgspec.structs.replace(record, began=datetime(1999, 1, 1), asked="")
    (run_dir / "task.json").write_bytes(msgspec.json.encode(then))
    prompts, _, _ = _open(run_dir, _config(sums))
    assert prompts.text(prompts(0)) == f"1999: {prompts(0).text}"
    assert msgspec.structs.replace(_recorded(run_dir), asked="") == then


def test_a_prompt_without_tokens_is_refused(run_dir: Path, sums: Path) -> None:
    tokenizer = _characters(run_dir / "model")
    tokenizer.normalizer = normalizers.Replace(Regex("."), "")
    tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    tokenizer.save(str(run_dir / "model" / "tokenizer.json"))
    with pytest.raises(UserError, match=r"has no tokens"):
        _open(run_dir, _config(sums))


@pytest.mark.parametrize(
    ("source", "lost"),
    [
        ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}", "system"),
        ("{{ messages[0].content }}", "user"),
        ("{% for m in messages %}{{ m.content[:2] }}{% endfor %}", "system and user"),
    ],
)
def test_a_template_that_leaves_something_out_is_refused(run_dir: Path, sums: Path, source: str, lost: str) -> None:
    (run_dir / "model" / "chat_template.jinja").write_text(source)
    with pytest.raises(UserError, match=f"does not print what the {lost} of the prompt"):
        _open(run_dir, _config(sums, system_prompt="Add them."))


@pytest.mark.parametrize(
    ("task", "name"),
    [("copy", "copy"), ("jsonl:../my data/x.jsonl", "jsonl-..-my-data-x.jsonl"), ("gym:ab", "gym-ab"), ("/" * 300, "")],
)
def test_a_run_directory_is_named_after_its_task(task: str, name: str) -> None:
    assert named_after(task) == name

"""Tasks of questions with answers: files, data sets, reasoning-gym and one's own classes."""

from __future__ import annotations

import csv
import json
import pickle
import re
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarm.errors import UserError
from swarm.tasks import check_task, load_task, questions, rewards
from swarm.tasks.base import Task, TaskOptions
from swarm.tasks.expressions import evaluate
from swarm.tasks.hub import fetch
from swarm.tasks.questions import is_held_out, prompt_id, read_questions
from swarm.tasks.reward_child import checked
from swarm.types import Prompt, Score


@pytest.fixture(autouse=True)
def _share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "HELD_OUT_SHARE", 0.2)  # Of few questions more must be held out than a run would


def _file(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def _rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(count)]


def _task(path: Path, **options: Any) -> Task:
    return load_task(TaskOptions(**{"name": f"jsonl:{path}", **options}))


def _refused(words: str, **options: Any) -> None:
    """UserError in one line that matches, when the task is made or first asked."""
    with pytest.raises(UserError, match=words) as caught:
        check_task(load_task(TaskOptions(**options)))
    assert "\n" not in str(caught.value)


def _all(task: Task, epoch: int = 0) -> list[str]:
    assert task.size is not None
    return [task.prompt(epoch * task.size + place).text for place in range(task.size)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return _file(tmp_path / "sums.jsonl", _rows(100))


def test_every_question_is_on_one_side_the_same_for_every_seed_and_order_of_the_file(
    path: Path, tmp_path: Path
) -> None:
    task = _task(path)
    train, held_out = _all(task), [prompt.text for prompt in task.held_out(1000)]
    assert sorted(train + held_out) == sorted(row["prompt"] for row in _rows(100))
    assert 10 <= len(held_out) <= 30
    assert task.held_out(3) == task.held_out(1000)[:3]
    backwards = _file(tmp_path / "backwards.jsonl", _rows(100)[::-1])
    assert task.held_out(99) == _task(path, seed=2).held_out(99) == _task(backwards).held_out(99)


def test_a_question_asked_twice_is_on_one_side_whatever_its_ids(tmp_path: Path) -> None:
    rows = [{**row, "id": f"{copy}-{row['prompt']}"} for row in _rows(50) for copy in range(2)]
    task = _task(_file(tmp_path / "twice.jsonl", rows))
    assert not {prompt.text for prompt in task.held_out(99)} & set(_all(task))


def test_a_file_may_say_itself_which_questions_are_held_out(tmp_path: Path) -> None:
    rows = [{**row, "held_out": place % 4 == 0} if place % 2 == 0 else row for place, row in enumerate(_rows(40))]
    # A question that is held out in one line is trained on by no other.
    file = _file(tmp_path / "own.jsonl", [*rows, {"prompt": "0+1=", "answer": "1"}])
    task = _task(file)
    assert {prompt.text for prompt in task.held_out(99)} == {f"{n}+1=" for n in range(0, 40, 4)}
    assert sorted(_all(task)) == sorted(f"{n}+1=" for n in range(40) if n % 4)


def test_an_epoch_asks_everything_once_in_an_order_of_its_own(path: Path) -> None:
    task = _task(path)
    first, second = _all(task), _all(task, epoch=1)
    assert sorted(first) == sorted(second) == sorted(set(first))
    assert first != second
    assert first != _all(_task(path, seed=1))
    assert _task(path).prompt(len(first) + 3).text == second[3], "a cursor is one number"


def test_ids_fit_whatever_the_file_says(tmp_path: Path) -> None:
    long = ["x" * 63 + str(n) * 40 for n in range(2)]
    rows = [{"prompt": "a", "answer": "b", "id": name} for name in (*long, "short", 7)]
    task = _task(_file(tmp_path / "ids.jsonl", [*rows, *_rows(50)]))
    prompts = [task.prompt(i) for i in range(task.size or 0)] + list(task.held_out(99))
    ids = [msgspec.convert(msgspec.to_builtins(prompt), Prompt).prompt_id for prompt in prompts]
    assert len(set(ids)) == 54
    assert {"short", "7"} <= set(ids)
    assert max(map(len, ids)) == 64


def test_without_an_id_a_prompt_is_called_after_its_question() -> None:
    one = Prompt(prompt_id="-", text="a", answer="b")
    assert prompt_id("", one) == prompt_id("", msgspec.structs.replace(one, answer="c"))
    assert prompt_id("", one) != prompt_id("", msgspec.structs.replace(one, messages=(("user", "a"),)))


def test_other_columns_numbers_chats_and_marks_of_the_encoding_are_read(tmp_path: Path) -> None:
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2+2?"}]
    rows = [{"question": turns, "target": 4}, {"question": turns[1:], "target": 4.5}]
    file = tmp_path / "chat.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + "".join(json.dumps(row) + "\r\n\n" for row in rows).encode())
    options = TaskOptions(name="jsonl:chat", columns=("question", "target"))
    assert [(p.text, p.messages, p.answer) for p in read_questions(file, options, at=str).train] == [
        ("2+2?", (("system", "Be short."), ("user", "2+2?")), "4"),
        ("2+2?", (), "4.5"),
    ]


def test_a_changed_file_has_another_digest(path: Path) -> None:
    before = _task(path).data_digest
    assert _task(path).data_digest == before
    path.write_bytes(path.read_bytes().replace(b'"100"', b'"101"'))
    assert _task(path).data_digest != before


def test_a_reward_process_makes_the_task_without_its_file(tmp_path: Path) -> None:
    options = pickle.loads(pickle.dumps(TaskOptions(name="jsonl:gone.jsonl", rewards={"numeric": 2.0})))  # noqa: S301
    assert options == msgspec.msgpack.decode(msgspec.msgpack.encode(options), type=TaskOptions)
    score = load_task(options).score(Prompt(prompt_id="a", text="1+1=", answer="2"), "it is 2")
    assert (score.reward, score.parts) == (2.0, {"numeric": 1.0})


A = b'"prompt": "a", "answer": "b"'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{%s}\n{"prompt": \n' % A, r"bad.jsonl:2 is not valid JSON"),
        (b"{%s}\n\n[1]\n" % A, r"bad.jsonl:3 is not a JSON object"),
        (b'{"prompt": "a"}\n', r"bad.jsonl:1 has no 'answer', only prompt: .* columns"),
        (b'{"prompt": null, "answer": "b"}\n', r"bad.jsonl:1: the 'prompt' is null"),
        (b'{"prompt": "a\xff", "answer": "b"}\n', r"bad.jsonl:1 is not UTF-8"),
        (b'{"prompt": "", "answer": "b"}\n', r"bad.jsonl:1: the prompt is empty"),
        (b'{"prompt": 1, "answer": "b"}\n', r"string or a list of chat messages"),
        (b'{"prompt": [{"role": "king", "content": "a"}], "answer": ""}\n', r'a "role" \(system, user, assistant\)'),
        (b'{"prompt": [{"role": "system", "content": "a"}], "answer": ""}\n', r"the user's, not the system's"),
        (b'{"prompt": "a", "answer": [1]}\n', r"bad.jsonl:1: the answer is neither"),
        (b'{"prompt": "a", "answer": true}\n', r"bad.jsonl:1: the answer is neither"),
        (b'{"id": "x", %s}\n' % A * 2, r"bad.jsonl:2: the id 'x' is already that of .*:1"),
        (b'{%s, "held_out": 1}\n' % A, r"bad.jsonl:1: held_out is true or false"),
        (b'{%s, "held_out": null}\n' % A, r"bad.jsonl:1: held_out is true or false"),
        (b'{%s, "held_out": true}\n' % A, r"is left to train on: the file itself says"),
        (b'{%s, "held_out": false}\n' % A, r"is held out: the file itself says"),
        (b"\n\n", r"is empty: it has no question"),
        (b"{%s}\n" % A, r"no question of .* is (held out|left to train on): it has 1; add"),
        (None, r"bad.jsonl: No such file"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "bad.jsonl").write_bytes(content)
    _refused(words, name=f"jsonl:{tmp_path / 'bad.jsonl'}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chess", "known tasks: copy.*jsonl:FILE.*hf:DATASET.*gym:NAME.*python:MODULE:CLASS"),
        ("json:x", "there is no task 'json:x'"),
        ("hf:", "names no data set"),
        ("gym:leg_countin", "reasoning-gym has no 'leg_countin'; it has leg_counting"),
        ("gym:composite", "cannot be made: Must specify at least one dataset; its options are datasets"),
        ("gym:chain_sum?terms=2", "unknown field `terms`; its options are min_terms, max_terms, min_digits"),
        ("gym:chain_sum?seed=2", "unknown field `seed`; its options are min_terms"),
        ("gym:chain_sum?min_terms=two", r"Expected `int`, .*`\$.min_terms`; its options are min_terms"),
        ("gym:chain_sum?min_terms=9", "max_terms must be >= min_terms; its options are min_terms"),
        ("gym:chain_sum?min_terms", "Expected `int`, got `str`"),
        ("gym:chain_sum?min_terms=1&min_terms=2", "sets an option twice"),
        ("gym:spell_backward?min_word_len=60&max_word_len=60", "cannot make question .*; try other options"),
        ("python:only_a_module", "does not name a class: write python:MODULE:CLASS"),
        ("python:no_such_module:Task", "no module 'no_such_module' here or installed"),
        ("python:json:Task", "json has no class Task"),
    ],
)
def test_a_task_that_is_not_there_is_one_line(name: str, words: str) -> None:
    _refused(words, name=name)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "jsonl:x", "rewards": {"numeric": 1.0}, "lenient": True}, "lenient changes only the rewards exact"),
        ({"name": "jsonl:x", "rewards": {"exat": 1.0}}, "there is no reward 'exat'"),
        ({"name": "gym:chain_sum", "task_options": {"min_terms": [2]}}, "Expected `int`, .*; its options are min_term"),
        ({"name": "gym:chain_sum?min_terms=1", "task_options": {"max_terms": 2}}, "in its name and in task_options"),
    ],
)
def test_options_that_cannot_be_are_one_line(options: dict[str, Any], words: str) -> None:
    _refused(words, **options)


@pytest.mark.parametrize(("name", "package"), [("hf:x", "hub"), ("gym:ab", "gym")])
def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setattr(f"swarm.tasks.{package}.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install '\.\[tasks\]'"):
        load_task(TaskOptions(name=name))


# -- data sets -----------------------------------------------------------------------------------------------


def test_a_data_set_on_disk_is_read_with_its_own_test_split(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra tasks is not installed")
    columns = {"question": [f"{n}?" for n in range(20)], "answer": list(range(20)), "id": [0] * 20}
    whole = datasets.Dataset.from_dict(columns)
    # The split for tests repeats a question of the other: it must not be trained on.
    splits = datasets.DatasetDict(train=whole.select(range(16)), test=whole.select(range(15, 20)))
    splits.save_to_disk(str(tmp_path / "set"))
    task = load_task(TaskOptions(name=f"hf:{tmp_path / 'set'}", columns=("question", "answer")))
    assert sorted(_all(task)) == sorted(f"{n}?" for n in range(15))
    assert {p.text: p.answer for p in task.held_out(99)} == {f"{n}?": str(n) for n in range(15, 20)}
    for split, column, words in (
        ("valid", "question", "it has the splits train, test: name one of them with @SPLIT"),
        ("train", "prompt", "it has no column 'prompt', only question, answer, id: name them with columns"),
    ):
        with pytest.raises(UserError, match=words):
            fetch(str(tmp_path / "set"), None, split, (column, "answer"), str(tmp_path), others=False)


AS_WRITTEN = [
    *("007", "27", "28.50", "null", "None", "NaN", "True", "1e5", "12345678901234567890123", "2024-05-17"),
    *("", "a,b\nc"),
]


@pytest.mark.parametrize("name", ["odd[1]@2:3.csv", "rows.json", "lines.jsonl"])
def test_text_files_are_read_as_they_are_written(tmp_path: Path, name: str) -> None:
    path, expected = tmp_path / name, {f"{n}?": text for n, text in enumerate(AS_WRITTEN)}
    with path.open("w", newline="") as file:
        if path.suffix == ".csv":
            csv.writer(file).writerows([("prompt", "answer"), *expected.items()])
        else:
            rows = [f'{{"prompt": "{asked}", "answer": {json.dumps(text)}}}' for asked, text in expected.items()]
            for asked, number in (("a?", "28.50"), ("b?", "12345678901234567890123")):
                rows.append(f'{{"prompt": "{asked}", "answer": {number}}}')
                expected[asked] = number
            file.write("\n".join(rows) if path.suffix == ".jsonl" else f"[{','.join(rows)}]")
    task = load_task(TaskOptions(name=f"hf:{path}"))
    held_out = {p.text: p.answer for p in task.held_out(99)}
    assert {task.prompt(i).text: task.prompt(i).answer for i in range(task.size or 0)} | held_out == expected


def test_a_file_of_the_librarys_own_format_may_have_signs_in_its_name(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra tasks is not installed")
    path = tmp_path / "odd[1]@2:3.parquet"
    rows = {"prompt": [f"{n}?" for n in range(20)], "answer": [f"{n:03}" for n in range(20)]}
    datasets.Dataset.from_dict(rows).to_parquet(str(path))
    task = load_task(TaskOptions(name=f"hf:{path}"))
    assert {p.text: p.answer for p in task.held_out(99)}.items() <= dict(zip(*rows.values(), strict=True)).items()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"prompt": "a?", "answer": 1}\n{"prompt": "b?", "answer": 2}\n'),
        ("a.csv", "id,prompt,answer\n1,a?,1\n1,b?,2\n"),
        ("a.csv", ",prompt,answer,\n0,a?,1,\n1,b?,2,\n"),
        ("a.csv", "prompt,answer,held_out\na?,1,true\nb?,2,false\n"),
        ("a.jsonl", '{"id": 1, "prompt": "a?", "answer": 1, "x": NaN}\n{"id": 1, "prompt": "b?", "answer": 2}\n'),
    ],
)
def test_other_columns_of_a_data_set_do_no_harm(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    task = load_task(TaskOptions(name=f"hf:{tmp_path / name}"))
    with suppress(UserError):  # Both may be on one side
        task.held_out(1)
    found = task._questions  # type: ignore[attr-defined]
    assert [(p.text, p.answer) for p in found.train] == [("a?", "1"), ("b?", "2")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"prompt,answer,answer\n1,2,3\n", "two of its columns have one name: prompt, answer, answer"),
        ("a.csv", b"prompt,answer\n1,2,3\n", "line 2 has 3 values for 2 columns"),
        ("a.csv", b"prompt,answer\n\xe9,2\n", "it is not UTF-8 .* at byte 14.*: save the file in that"),
        ("a.csv", b'prompt,answer\n"1,2\n', "it cannot be read: unexpected end of data"),
        ("a.csv", b"", "has no|is empty"),
        ("a.csv", b"question,answer\n1,2\n", "it has no column 'prompt', only question, answer"),
        ("a.json", b'{"prompt": "1", "answer": "2"}', "it is not a list of rows"),
        ("a.json", b'[{"prompt": "1", "answer": NaN}]', "the 'answer' is null"),
        ("a.jsonl", b'{"answer": "2", "answer": "3"}', "a key comes twice among answer, answer"),
        ("a.jsonl", b'{"prompt": "\\ud800", "answer": "2"}', "surrogates not allowed"),
    ],
)
def test_what_is_wrong_with_a_text_file_is_one_line(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    _refused(words, name=f"hf:{tmp_path / name}")


def test_classes_are_named_and_what_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra tasks is not installed")
    kinds = datasets.ClassLabel(names=["no", "yes"])
    asked = {"prompt": [f"{n}?" for n in range(40)], "answer": [n % 2 for n in range(40)]}
    features = datasets.Features(prompt=datasets.Value("string"), answer=kinds)
    datasets.Dataset.from_dict(asked, features=features).save_to_disk(str(tmp_path / "classes"))
    task = load_task(TaskOptions(name=f"hf:{tmp_path / 'classes'}"))
    assert {task.prompt(i).answer for i in range(30)} == {"no", "yes"}
    assert "'answer' holds numbers of classes" in capsys.readouterr().err
    for number, value in enumerate((datetime(2024, 5, 17), b"7", [7])):
        where = tmp_path / str(number)
        datasets.Dataset.from_dict({"prompt": asked["prompt"], "answer": [value] * 40}).save_to_disk(str(where))
        _refused("neither text nor a number", name=f"hf:{where}")


@pytest.mark.parametrize("given", ['"id": null, ', '"id": "", ', '"meta": {"id": 1}, '])
def test_what_is_no_id_of_the_row_may_come_twice(tmp_path: Path, given: str) -> None:
    others = "".join(f'{{"prompt": "{n}?", "answer": {n}}}\n' for n in range(60))
    (tmp_path / "q.jsonl").write_text(others + f'{{{given}"prompt": "same?", "answer": 1}}\n' * 2)
    check_task(_task(tmp_path / "q.jsonl"))


def test_a_data_set_that_is_not_there_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="the extra tasks is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    _refused(r"hf:nobody/nothing cannot be read: ", name="hf:nobody/nothing")


# -- reasoning-gym -------------------------------------------------------------------------------------------


def test_reasoning_gym_asks_and_scores() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra tasks is not installed")
    task, again, other = (load_task(TaskOptions(name="gym:leg_counting", seed=seed)) for seed in (3, 3, 4))
    trained = [task.prompt(i) for i in range(40)]
    assert [again.prompt(i) for i in (30, 2)] == [trained[30], trained[2]]
    assert load_task(TaskOptions(name="gym:leg_counting", seed=4)).prompt(0) != trained[0]
    told = list[str]()
    other.progress = told.append
    held_out = other.held_out(5)
    assert told[0] == "gym:leg_counting: 0 of 5 held-out questions found among 0"
    assert "4 of 5" in told[-1]
    assert list(task.held_out(5)) == list(held_out)
    assert len({p.text for p in held_out} - {p.text for p in trained}) == 5
    assert not any(is_held_out(p) for p in trained)
    prompt = trained[0]
    for completion in (prompt.answer, f"<think>3 legs</think>so\n<answer> {prompt.answer} </answer>."):
        assert again.score(prompt, completion).exact
    for completion in ("", f"<think>{prompt.answer}", "<answer>none</answer>"):
        assert not again.score(prompt, completion).exact


def test_options_of_reasoning_gym_stand_in_the_name_or_in_a_table() -> None:
    pytest.importorskip("reasoning_gym", reason="the extra tasks is not installed")
    options = {"min_terms": 2, "max_terms": 2, "max_digits": 1}
    named = load_task(TaskOptions(name="gym:chain_sum?min_terms=2&max_terms=2&max_digits=1"))
    sent = msgspec.msgpack.decode(
        msgspec.msgpack.encode(TaskOptions(name="gym:chain_sum", task_options=options)), type=TaskOptions
    )
    prompts = [named.prompt(i) for i in range(20)]
    assert [load_task(sent).prompt(i) for i in range(20)] == prompts
    assert all(re.search(r": \d [+-] \d =$", prompt.text) for prompt in prompts)
    assert load_task(sent).score(prompts[0], prompts[0].answer).exact
    sums = load_task(TaskOptions(name="gym:basic_arithmetic", task_options={"operators": ["+"]}))
    assert all(set(sums.prompt(i).text) & set("+-*/") <= {"+", "-"} for i in range(20))


# -- one's own -----------------------------------------------------------------------------------------------

OWN = '''
from swarm.types import Prompt, Score

class Whole:
    """Say the number again."""
    max_new_tokens = 8
    def __init__(self, seed): self.seed = seed
    def prompt(self, index): return Prompt(prompt_id=f"p{index}", text=f"{self.seed}/{index}", answer="1")
    def held_out(self, count): return [Prompt(prompt_id="h", text="h", answer="1")]
    def score(self, prompt, completion): return {"1": 1, "half": 0.5, "s": Score(reward=3, exact=False)}[completion]

class Configured(Whole):
    chat, size, data_digest, description = True, 7, "d", "mine"
    def __init__(self, options): super().__init__(options.seed)

class Unlike:
    def prompt(self, index): ...
'''
"""A module of tasks; its classes that are none stand in the table below."""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, which is not on the path."""
    (tmp_path / "my_own_task.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_own_task", raising=False)
    return "python:my_own_task:"


def test_a_task_of_ones_own_needs_three_methods_and_may_say_more(own: str) -> None:
    task = load_task(TaskOptions(name=own + "Whole", seed=5))
    check_task(task)
    assert (task.name, task.description, task.max_new_tokens) == (own + "Whole", "Say the number again.", 8)
    assert (task.chat, task.size, task.data_digest) == (False, None, "")
    prompt = task.prompt(2)
    assert prompt.text == "5/2"
    assert task.score(prompt, "1") == Score(reward=1.0, exact=True)
    assert task.score(prompt, "half") == Score(reward=0.5, exact=False)
    assert task.score(prompt, "s").reward == 3
    task = load_task(TaskOptions(name=own + "Configured", seed=5))
    assert (task.description, task.chat, task.size, task.data_digest) == ("mine", True, 7, "d")
    assert task.prompt(1).text == "5/1"


@pytest.mark.parametrize("said", ["np.bool_(True)", "np.float32(1.0)", "np.int64(1)", "True", "torch.tensor(1.0)"])
def test_a_number_of_any_library_is_a_reward(own: str, tmp_path: Path, said: str) -> None:
    score = f"\nimport numpy as np, torch\nWhole.score = lambda self, prompt, completion: {said}\n"
    (tmp_path / "my_own_task.py").write_text(OWN + score)
    task = load_task(TaskOptions(name=own + "Whole"))
    assert checked(task.score(task.prompt(0), "1")) == Score(reward=1.0, exact=True)


@pytest.mark.parametrize("reward", [1e160, -2e9, float("nan"), float("inf")])
def test_a_reward_that_cannot_be_computed_with_has_failed(reward: float) -> None:
    for score in (Score(reward=reward, exact=False), Score(reward=0.0, exact=False, parts={"x": reward})):
        with pytest.raises(ValueError, match="is not a finite number up to 1e\\+09"):
            checked(score)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("held_out(self, count): return []", r"has no held-out prompt"),
        ("prompt(self, index): return '2+2='", r"prompt\(0\) of .* did not return a swarm.types.Prompt"),
        ("held_out(self, count): return [1 / 0]", r"held_out\(1\) of .* raised ZeroDivisionError"),
        ("prompt(self, index): return Prompt(prompt_id='x' * 65, text='a', answer='b')", r"prompt_id of 1 to 64"),
        ("__init__(self, seed): raise OSError('no disk')", r"made with \(seed\) or \(options\): OSError: no disk"),
        ("__init__(self, other): ...", r"could not be made with \(seed\) or \(options\): TypeError"),
    ],
)
def test_a_class_that_is_no_task_is_one_line(own: str, tmp_path: Path, method: str, words: str) -> None:
    (tmp_path / "my_own_task.py").write_text(f"{OWN}\nclass Other(Whole):\n    def {method}\n")
    _refused(words, name=own + "Other")


def test_a_module_without_a_task_is_one_line(own: str, tmp_path: Path) -> None:
    _refused(r"is not a task: it has no held_out\(\), no score\(\)", name=own + "Unlike")
    (tmp_path / "broken_task.py").write_text("1 +\n")
    _refused(r"importing broken_task raised SyntaxError", name="python:broken_task:Task")


@pytest.mark.parametrize(
    "name", ["n_queens", "spiral_matrix", "puzzle24", "polynomial_multiplication", "simple_integration"]
)
def test_an_answer_runs_no_code_on_the_learners_machine(name: str, tmp_path: Path) -> None:
    task = load_task(TaskOptions(name=f"gym:{name}"))
    prompt = task.prompt(0)
    assert task.score(prompt, f"<answer>{prompt.answer}</answer>").reward == 1.0
    made = tmp_path / "made"
    for answer in (f'__import__("pathlib").Path("{made}").touch()', f'["1" for _ in [open("{made}", "w")]]'):
        assert task.score(prompt, f"<answer>{answer}</answer>").reward < 1.0
    assert not made.exists()


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("propositional_logic", "(" * 4000 + "P" + ")" * 4000),
        ("propositional_logic", " \u2227 ".join("abcdefghijklmnopqrstuvwxyz")),
        ("countdown", "9**(9**9)"),
        ("countdown", "1e999999999"),
        ("puzzle24", "2**2**2**2**2**2"),
        ("puzzle24", "Rational('1e999999999')"),
        ("coin_flip", "1e999999999"),
    ],
)
def test_an_answer_that_never_ends_is_wrong(name: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards, "ASIDE_CPU_S", 0.3)
    task = load_task(TaskOptions(name=f"gym:{name}"))
    assert task.score(task.prompt(0), f"<answer>{answer}</answer>") == Score(reward=0.0, exact=False)


@pytest.mark.parametrize(
    ("source", "value"), [("2*(3+4)-1", 13), ("[[1, 2], ['a']]", [[1, 2], ["a"]]), (" 7 // 2", 3), ("not 1 < 2", False)]
)
def test_expressions_are_evaluated(source: str, value: object) -> None:
    assert evaluate(source) == value


@pytest.mark.parametrize(
    "source", ["().__class__", "open('x')", "[x for x in 'ab']", "lambda: 1", "x = 1", "exp.x", "sin(1)(2)", "(" * 5000]
)
def test_what_is_more_than_an_expression_is_not(source: str) -> None:
    with pytest.raises(ValueError, match=r"no |not an expression|the text"):
        evaluate(source)

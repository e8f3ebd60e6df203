"""Calculator and Python tool: calls, answers, and a sandbox that is really one."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.environments import tools
from examples.environments.tools import ROLE, Calculator, PythonTool, ToolEpisode
from swarm.errors import UserError

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a sandbox for programs")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine Python alone may take longer to start than a program is given."""
    monkeypatch.setattr(tools, "WALL_S", 60.0)


def answer_of(tool: ToolEpisode, seed: int) -> str:
    tool.reset(seed)
    return tool._answer


@given(st.integers(0, 2**40))
def test_the_right_answer_pays_and_every_other_does_not(seed: int) -> None:
    tool = Calculator()
    answer = answer_of(tool, seed)
    right = tool.step(f"It is <answer> {int(answer):,}. </answer>")
    assert (right.rewards, right.done, right.solved) == ((1.0,), True, True)
    assert answer not in tool.reset(seed)[0][1]
    for wrong in ("", "0", f"{answer}0", f"{answer} or 1", str(int(answer) + 1)):
        step = tool.step(f"<answer>{wrong}</answer>")
        assert (step.rewards, step.done, step.solved) == ((0.0,), True, False)


def test_a_start_is_a_function_of_its_seed() -> None:
    assert Calculator().reset(5) == Calculator().reset(5)
    assert len({Calculator().reset(seed)[0][1] for seed in range(100)}) == 100


@pytest.mark.parametrize(
    ("call", "result"), [("12345 * 678", "8369910"), ("(1 + 2) * -3", "-9"), ("7 // 2 + 7 % 2", "4"), ("1/4", "0.25")]
)
def test_the_calculator_computes(call: str, result: str) -> None:
    tool = Calculator()
    tool.reset(0)
    step = tool.step(f"Let me see: <tool>{call}</tool> and so <answer>1</answer>")
    assert (step.messages, step.done, dict(step.parts)) == (((ROLE, result),), False, {})


@pytest.mark.parametrize("call", ["9**9**9", "1/0", "", "()+1", "__import__('os')", "1 2", "(" * 150, "9" * 201, "1e9"])
def test_the_calculator_says_what_it_cannot_compute(call: str) -> None:
    tool = Calculator()
    tool.reset(0)
    step = tool.step(f"<tool>{call}</tool>")
    assert step.messages[0][1].startswith("Error: ")
    assert (step.rewards, step.done, dict(step.parts)) == ((0.0,), False, {"tool_errors": 1.0})


def test_thoughts_call_nothing_and_a_turn_without_a_call_is_told_how() -> None:
    tool = Calculator()
    tool.reset(0)
    step = tool.step("<think><answer>1</answer></think> <tool>1+1")
    assert "no whole call" in step.messages[0][1]
    assert tool.manual in step.messages[0][1]
    assert not step.done


@given(st.text(alphabet="<>/tolanswer0123456789+-*/%(). \n", max_size=80) | st.text(max_size=80), st.booleans())
def test_no_text_raises_or_pays(text: str, is_call: bool) -> None:
    tool = Calculator()
    tool.reset(1)
    step = tool.step(f"<tool>{text}</tool>" if is_call else text)
    assert step.rewards in ((0.0,), (1.0 if tool._answer in text else 0.0,))
    assert sum(len(content) for _, content in step.messages) < 1000


def test_hostile_text_is_read_in_linear_time() -> None:
    tool = Calculator()
    tool.reset(0)
    for text in ("<tool>" * 40_000, "<tool><answer>" * 20_000, "<answer>" * 20_000 + "</tool>" * 20_000):
        began = time.process_time()
        assert dict(tool.step(text).parts) == {"tool_errors": 1.0}
        assert time.process_time() - began < 5, "it took minutes when each call was read to the end"


@LINUX
def test_a_program_answers_its_question() -> None:
    tool = PythonTool()
    seed = next(seed for seed in range(50) if "For how many" in tool.reset(seed)[0][1])
    question = tool.reset(seed)[0][1]
    words = question.replace(")", " ").replace("?", " ").split()
    n, add, times = (int(word) for word in words if word.isdigit() and len(word) == 5)
    step = tool.step(f"<python>print(sum((n*n+{add})%101 < n*{times}%101 for n in range(1,{n}+1)))</python>")
    assert tool.step(f"<answer>{step.messages[0][1]}</answer>").solved
    silent = tool.step("<python>x = 1</python>")
    assert silent.messages == ((ROLE, "(it printed nothing)"),)


ATTACKS = {
    "a fork": ("import os\nwhile True: os.fork()", "PermissionError"),
    "threads": ("import threading\nwhile True: threading.Thread(target=input).start()", "can't start new thread"),
    "another program": ("import os; os.execv('/bin/sh', ['sh', '-c', 'echo got out'])", "PermissionError"),
    "10 GB": ("x = bytearray(10 << 30)", "MemoryError"),
    "10 GB, shared": ("import mmap; m = mmap.mmap(-1, 10 << 30)", "Cannot allocate memory"),
    "a file": ("open({tmp!r} + '/written', 'w')", "PermissionError"),
    "a temporary file": ("import tempfile; tempfile.TemporaryFile()", "No usable temporary directory"),
    "a file of shared memory": ("open('/dev/shm/written', 'w')", "PermissionError"),
    "another's rights": ("import os; os.chmod({tmp!r}, 0)", "PermissionError"),
    "a file's end": ("import os; os.truncate({tmp!r} + '/secret', 0)", "PermissionError"),
    "a secret file": ("print(open({tmp!r} + '/secret').read())", "PermissionError"),
    "the learner's variables": ("print(open('/proc/{pid}/environ').read())", "PermissionError"),
    "the learner's memory": ("print(open('/proc/{pid}/mem', 'rb').read(9))", "PermissionError"),
    "a signal": ("import os; os.kill({pid}, 0)", "PermissionError"),
    "a signal by a descriptor": ("import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, {pid})", "PermissionError"),
    "the learner's limits": ("import resource as r; r.prlimit({pid}, r.RLIMIT_NOFILE, (9, 9))", "PermissionError"),
    "its own limits": ("import resource as r; r.setrlimit(r.RLIMIT_CPU, (99, 99))", "not allowed to raise"),
    "the network": ("import socket; socket.create_connection(('127.0.0.1', 1))", "PermissionError"),
    "a Unix socket": ("import socket; socket.socketpair()", "PermissionError"),
}


@LINUX
@pytest.mark.parametrize("name", ATTACKS)
def test_the_sandbox_stops_and_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text("the secret")
    monkeypatch.setenv("SOME_TOKEN", "the secret")
    program, said = ATTACKS[name]
    tool = PythonTool()
    tool.reset(0)
    step = tool.step(f"<python>{program.format(tmp=str(tmp_path), pid=os.getpid())}</python>")
    assert said in step.messages[0][1]
    assert "secret" not in step.messages[0][1].replace("/secret'", "")
    assert dict(step.parts) == {"tool_errors": 1.0}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret"]
    assert (tmp_path / "secret").read_text() == "the secret"


@LINUX
def test_a_program_gets_no_variable_of_the_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "the secret")
    step = PythonTool().step("<python>import os; print(sorted(os.environ))</python>")
    assert set(step.messages[0][1].strip("[]").replace("'", "").split(", ")) <= {*tools.VARIABLES, "LC_CTYPE"}


@LINUX
@pytest.mark.parametrize(
    "program", ["while True: pass", "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"]
)
def test_an_endless_loop_is_stopped(program: str) -> None:
    step = PythonTool().step(f"<python>print('begun')\n{program}</python>")
    assert "begun\nIt took too long and was stopped." in step.messages[0][1]
    assert dict(step.parts) == {"tool_errors": 1.0}


@LINUX
def test_a_program_that_waits_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    tool = PythonTool()
    monkeypatch.setattr(tools, "WALL_S", 0.5)
    step = tool.step("<python>import threading; threading.Lock().acquire() and threading.Event().wait()</python>")
    assert "It took too long" in step.messages[0][1]


@LINUX
def test_a_program_cannot_sleep_while_others_wait_for_it() -> None:
    for program in ("import time; time.sleep(1000)", "import select; select.select([], [], [])"):
        assert "PermissionError" in PythonTool().step(f"<python>{program}</python>").messages[0][1]


@LINUX
def test_a_program_empties_no_file_that_it_may_read() -> None:
    """One under Python's own directory, which is readable, and which this user may write."""
    try:
        file = tempfile.NamedTemporaryFile(dir=Path(sys.base_prefix) / "lib", suffix=".txt")  # noqa: SIM115
    except OSError:
        pytest.skip("this user may write no file beside Python's own: nothing to empty")
    with file:
        Path(file.name).write_text("kept")
        program = f"import os; os.open({file.name!r}, os.O_RDONLY | os.O_TRUNC)"
        assert "PermissionError" in PythonTool().step(f"<python>{program}</python>").messages[0][1]
        assert Path(file.name).read_text() == "kept"


@LINUX
@pytest.mark.parametrize("program", ["while True: print('x' * 99)", "import os\nwhile True: os.write(1, b'x' * 10**8)"])
def test_what_is_printed_is_cut(program: str) -> None:
    step = PythonTool().step(f"<python>{program}</python>")
    assert 1900 <= len(step.messages[0][1]) <= 2300


@LINUX
@pytest.mark.parametrize("program", ["\0", "\udcff", "def f(: pass", "exit(3)", "raise SystemExit('no')"])
def test_a_broken_program_is_an_error_like_any_other(program: str) -> None:
    assert dict(PythonTool().step(f"<python>{program}</python>").parts) == {"tool_errors": 1.0}


def test_without_a_sandbox_there_is_no_such_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    refusing = tmp_path / "confined.py"
    refusing.write_text("import sys; sys.exit('there is no sandbox for this')")
    monkeypatch.setattr(PythonTool, "has_sandbox", False)
    monkeypatch.setattr(tools, "SANDBOX", str(refusing))
    with pytest.raises(UserError, match="needs a sandbox: there is no sandbox for this"):
        PythonTool()


@LINUX
def test_the_sandbox_is_looked_for_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    PythonTool()
    monkeypatch.setattr(PythonTool, "use", lambda self, call: pytest.fail("a second sandbox"))
    PythonTool()

"""What is said before anything is imported that a system may lack."""

from __future__ import annotations

import subprocess
import sys

WINDOWS = """
import runpy, sys
for missing in ("fcntl", "resource", "termios", "uvloop"):
    sys.modules[missing] = None
sys.platform = "win32"
sys.argv = ["echo-node", *{arguments}]
runpy.run_module("swarm", run_name="__main__", alter_sys=False)
"""


def test_on_windows_one_line_says_wsl2_and_how() -> None:
    program = WINDOWS.format(arguments=["join", "--bootstrap", "host"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("echo-node: ")
    assert "WSL2" in done.stderr
    assert "wsl --install -d Ubuntu" in done.stderr

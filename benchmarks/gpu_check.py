"""Whether all that runs on a GPU works on this one, and how fast: what `bin/gpu-check` runs.

bin/gpu-check
bin/gpu-check --only mfu-0.6b --only copies
bin/gpu-check --dry-run

Each check is a benchmark in a process of its own, so that one that dies or runs out of memory takes no other with it,
with random weights of a named size; nothing is downloaded. After each one its line of the table is printed and all
figures are written to `--out`. What is not installed, or has no room, is skipped by name. A dry run does the same on
the CPU with tiny models and no limit but that everything runs. Exit status 1 if a limit was missed or a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from swarm.sampler.choice import gpu_build

Outcome = Literal["met", "missed", "failed", "skipped"]
GIB = 1 << 30
OUT = Path("gpu-check.json")
SAID = 400  # Last characters of what a failed check said, in its line


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Figures of a check by their path, and what they may be. `*` in a path is each of a list."""

    path: str
    least: float = float("-inf")
    most: float = float("inf")

    def found(self, figures: Any) -> list[float]:
        places: list[Any] = [figures]
        for part in self.path.split("."):
            places = [one for place in places for one in (place if part == "*" else [place[part]])]
        return [float(one) for one in places]

    def line(self, figures: Any) -> str:
        values = ", ".join(f"{value:.3g}" for value in self.found(figures))
        bounds = [f"at least {self.least:g}"] * (self.least > float("-inf"))
        bounds += [f"at most {self.most:g}"] * (self.most < float("inf"))
        return f"{self.path.rpartition('.')[2]} {values} ({' and '.join(bounds)})"

    def is_met(self, figures: Any) -> bool:
        found = self.found(figures)
        return bool(found) and all(self.least <= value <= self.most for value in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`command` runs on a GPU, `dry` in its place on the CPU; both end with a line of JSON. `needs` says why it cannot
    run here, or ""."""

    name: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    limits: tuple[Limit, ...]
    limit_s: float = 120.0
    needs: Callable[[], str] = lambda: ""


def package(name: str) -> Callable[[], str]:
    return lambda: "" if find_spec(name) else f"{name} is not installed"


def memory(nbytes: int) -> Callable[[], str]:
    def lacks() -> str:
        import torch

        there = torch.cuda.get_device_properties(0).total_memory
        return "" if there >= nbytes else f"needs a card of {nbytes / GIB:.0f} GiB"

    return lacks


def mfu(name: str, parameters: str, *more: str, needs: Callable[[], str] = lambda: "", limit_s: float = 90.0) -> Check:
    """30 % is what others plan a learner with; recomputed layers do not count as work."""
    return Check(
        name=name,
        command=("learner", "--parts", "mfu", "--repeats", "2", "--parameters", parameters, *more),
        # No flash attention on a CPU.
        dry=("learner", "--parts", "mfu", "--quick", *(one for one in more if one == "--compile")),
        limits=(Limit(path="mfu.mfu", least=0.3),),
        limit_s=limit_s,
        needs=needs,
    )


def needs_vllm() -> str:
    import torch

    if torch.version.cuda and not gpu_build():
        return "vllm's own build is not installed"
    return package("vllm")()


def engine(kind: str, part: str, limits: tuple[Limit, ...], *, limit_s: float = 120.0) -> Check:
    command = ("sampler", "--engine", kind, "--parts", part)
    return Check(
        name=f"{kind}-{part}",
        command=(*command, "--device", "cuda", "--parameters", "0.6e9"),
        dry=(*command, "--quick"),
        limits=limits,
        limit_s=limit_s,
        needs=needs_vllm if kind == "vllm" else lambda: "",
    )


FLASH = ("--attention", "flash_attention_2")
SHARE_OF_BUS = 0.5
"""Of what one pinned buffer takes: below that something is copied twice, or by way of memory that is not pinned."""

CHECKS = (
    mfu("mfu-0.6b", "6e8"),
    mfu("mfu-0.6b-compile", "6e8", "--compile", limit_s=150.0),
    mfu("mfu-0.6b-flash", "6e8", *FLASH, needs=package("flash_attn")),
    mfu("mfu-1.7b", "1.7e9", needs=memory(60 * GIB)),
    mfu("mfu-1.7b-compile", "1.7e9", "--compile", limit_s=150.0, needs=memory(60 * GIB)),
    Check(
        name="memory",
        command=("learner", "--parts", "memory", "--device", "cuda"),
        dry=("learner", "--parts", "memory", "--quick"),
        limits=(Limit(path="memory.*.estimate_ratio", least=0.85, most=1.15),),
    ),
    Check(
        name="copies",
        command=("gpu_parts", "copies", "--device", "cuda", "--parameters", "4e9"),
        dry=("gpu_parts", "copies", "--device", "cpu", "--parameters", "3e5"),
        limits=(
            Limit(path="stage_share_of_bus", least=SHARE_OF_BUS),
            Limit(path="checkpoint_share_of_bus", least=SHARE_OF_BUS),
        ),
        needs=memory(70 * GIB),
    ),
    Check(
        name="rank",
        command=("gpu_parts", "rank", "--device", "cuda"),
        dry=("gpu_parts", "rank", "--device", "cpu"),
        # In bf16 FSDP rounds the weights once, and autocast each time: the gradients differ by as much.
        limits=(
            Limit(path="backend_is_nccl", least=1.0),
            Limit(path="loss_apart", most=0.02),
            Limit(path="grad_norm_apart", most=0.05),
        ),
    ),
    engine("transformers", "swaps", (Limit(path="swaps_met", least=1.0),)),
    engine("transformers", "recompute", ()),
    engine("vllm", "swaps", (Limit(path="swaps_met", least=1.0),), limit_s=240.0),
    engine("vllm", "recompute", (), limit_s=240.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    outcome: Outcome
    seconds: float
    line: str
    figures: Mapping[str, Any]


def run(check: Check, *, dry: bool) -> Result:
    began = time.monotonic()
    if why := "" if dry and not check.name.startswith("vllm") else check.needs():
        return Result(name=check.name, outcome="skipped", seconds=0.0, line=why, figures={})
    module, *arguments = check.dry if dry else check.command
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments, "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=check.limit_s * (5 if dry else 1))
    except subprocess.TimeoutExpired:
        said = f"took longer than {check.limit_s:.0f} s"
        return Result(name=check.name, outcome="failed", seconds=time.monotonic() - began, line=said, figures={})
    seconds = time.monotonic() - began
    try:
        figures = json.loads(done.stdout.strip().splitlines()[-1])
        # 1 is a benchmark's word for a target of its own that was missed.
        if done.returncode not in (0, 1):
            raise ValueError(f"ended with status {done.returncode}")
    except (ValueError, IndexError):
        said = " ".join((done.stdout + done.stderr).split())[-SAID:]
        return Result(name=check.name, outcome="failed", seconds=seconds, line=said, figures={})
    return judged(check, figures, seconds, dry=dry)


def judged(check: Check, figures: Mapping[str, Any], seconds: float, *, dry: bool) -> Result:
    """A dry run has no limits: figures of a toy on a CPU say nothing."""
    if dry:
        return Result(name=check.name, outcome="met", seconds=seconds, line="it runs", figures=figures)
    try:
        is_met = all(limit.is_met(figures) for limit in check.limits)
        line = "; ".join(limit.line(figures) for limit in check.limits) or "no limit, see the JSON"
    except (KeyError, TypeError) as error:
        missing = f"its figures lack {error}"
        return Result(name=check.name, outcome="failed", seconds=seconds, line=missing, figures=figures)
    return Result(name=check.name, outcome="met" if is_met else "missed", seconds=seconds, line=line, figures=figures)


def about_this_machine() -> dict[str, Any]:
    import torch
    import transformers

    cards = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"cards": cards, "torch": torch.__version__, "transformers": transformers.__version__}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], prog="bin/gpu-check")
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny models: does every line run?")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the figures go ({OUT})")
    parser.add_argument("--json", action="store_true", help="the figures as the last line too")
    options = parser.parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    about = about_this_machine()
    if not about["cards"] and not options.dry_run:
        parser.error("torch sees no CUDA device here; --dry-run runs all of it on the CPU")
    print(f"on {', '.join(about['cards']) or 'a CPU'}, torch {about['torch']}", flush=True)
    results: list[Result] = []
    for check in CHECKS:
        if options.only and check.name not in options.only:
            continue
        result = run(check, dry=options.dry_run)
        results.append(result)
        print(f"{result.name:<24} {result.outcome:<8} {result.seconds:6.0f} s  {result.line}", flush=True)
        written = {**about, "dry_run": options.dry_run, "checks": [asdict(one) for one in results]}
        options.out.write_text(json.dumps(written, indent=1))
    if options.json:
        print(json.dumps(written))
    return int(any(one.outcome in ("missed", "failed") for one in results))


if __name__ == "__main__":
    sys.exit(main())

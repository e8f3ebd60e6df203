"""Whether all that runs on a GPU works on this one, and how fast: what `bin/gpu-check` runs.

bin/gpu-check
bin/gpu-check --only mfu-0.6b --only rank
bin/gpu-check --dry-run

Each check is a benchmark in a process of its own, with random weights of a named size; nothing is downloaded. The first
ones are worth most: after `--minutes` what is left is skipped, by name. After each one its line is printed and all
figures are written to `--out`. What is not installed, or has no room, is skipped by name. A dry run does the same on
the CPU with tiny models and only such limits as hold everywhere. Exit status 1 if a limit was missed, a check failed or
none could run. A process that dies, hangs, says nothing or misses a limit takes no other check with it: its whole group
is killed when it ends or its time is up. Nothing is imported here but what every machine has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

GIB = 1 << 30
OUT = Path("gpu-check.json")
MINUTES = 8.0  # Of all checks on one card: a lent machine takes commands of ten minutes, and has to be set up within

Outcome = Literal["met", "missed", "failed", "skipped"]
SAID = 400  # Last characters of what a failed check said, in its line
KEPT = 8000  # The same in the file of figures: a lent machine is gone afterwards, with its logs
DRY_FACTOR = 5.0  # A CPU that others use too is slower than the card that a share is meant for
MIN_S = 15.0  # Loading torch and making a model takes longer: a check with less time left is not begun
OUT_OF_TIME = "out of time"
MISSED = (0, 1)  # A benchmark's statuses when it has figures; with 1 they missed a target of its own
LEARNER = (
    *("torch", "transformers", "msgspec", "blake3", "cryptography"),
    *("numpy", "pydantic", "safetensors", "zstandard"),
)
"""What the learner's part of the checkout imports. A machine may have torch and transformers without the others."""

ENGINE = (*LEARNER, "psutil", "pytest")


# -- one check -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Figures of a check by their path, and what they may be: anything, if they are only to be shown. `*` in a path is
    each of a list. What holds `everywhere` is of no device's speed or memory."""

    path: str
    least: float = float("-inf")
    most: float = float("inf")
    everywhere: bool = False

    def found(self, figures: Any) -> list[float]:
        places: list[Any] = [figures]
        for part in self.path.split("."):
            places = [one for place in places for one in (place if part == "*" else [place[part]])]
        return [float(one) for one in places]

    def line(self, figures: Any) -> str:
        values = ", ".join(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" for value in self.found(figures))
        missed = "" if self.is_met(figures) else ": missed"
        bounds = [f"at least {self.least:g}"] * (self.least > float("-inf"))
        bounds += [f"at most {self.most:g}"] * (self.most < float("inf"))
        return f"{self.path.rpartition('.')[2]} {values}" + (f" ({' and '.join(bounds)})" if bounds else "") + missed

    def is_met(self, figures: Any) -> bool:
        """What is not a number keeps to no limit."""
        found = self.found(figures)
        return bool(found) and all(self.least <= value <= self.most for value in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`command`, a module and its arguments, runs on a GPU; `dry` in its place on the CPU. Both end with a line of
    JSON. Of all the time it has `limit_s`. `packages` have to be importable for either. `needs` says why the GPU's
    cannot run here, or ""."""

    name: str
    command: tuple[str, ...]
    dry: tuple[str, ...]
    limits: tuple[Limit, ...]
    limit_s: float
    packages: tuple[str, ...] = ()
    needs: Callable[[], str] = lambda: ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """`line` is for people; `said` is the end of what a check wrote that failed."""

    name: str
    outcome: Outcome
    line: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)
    said: str = ""


def run(check: Check, *, dry: bool, left_s: float = float("inf")) -> Result:
    lacking = ", ".join(name for name in check.packages if find_spec(name) is None)
    why = f"not installed: {lacking}" if lacking else "" if dry else check.needs()
    if why or left_s < MIN_S:
        return Result(name=check.name, outcome="skipped", line=why or OUT_OF_TIME)
    module, *arguments = check.dry if dry else check.command
    share_s = check.limit_s * (DRY_FACTOR if dry else 1.0)
    began = time.monotonic()
    status, answer, said = _ended([sys.executable, "-m", module, *arguments], min(share_s, left_s))
    seconds = time.monotonic() - began
    if status is None:
        # One that was not given its share has not shown anything.
        outcome: Outcome = "failed" if left_s >= share_s else "skipped"
        line = f"took longer than {share_s:.0f} s" if outcome == "failed" else f"{OUT_OF_TIME} after {seconds:.0f} s"
        return Result(name=check.name, outcome=outcome, seconds=seconds, line=line, said=said)
    figures = _figures(answer) if status in MISSED else None
    if figures is None:
        line = f"ended with status {status}: {' '.join(said.split())[-SAID:] or 'it said nothing'}"
        return Result(name=check.name, outcome="failed", seconds=seconds, line=line, said=said)
    return judged(check, figures, seconds, dry=dry)


def _ended(command: Sequence[str], limit_s: float) -> tuple[int | None, str, str]:
    """Run a command: its status, None if it had to be killed; its standard output; and the end of all that it wrote.

    Output goes to files, because a process that the command leaves behind would keep a pipe open."""
    with TemporaryDirectory(prefix="echo-node-gpu-check-") as directory:
        out, err = Path(directory) / "out", Path(directory) / "err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        status: int | None = None
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            # Also what a command has left behind that ended: it would keep memory of the card.
            for group in (process.pid, *_groups_under(process.pid)):
                with suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            process.wait()
        answer = out.read_text(errors="replace")
        return status, answer, (answer + err.read_text(errors="replace"))[-KEPT:]


def _groups_under(pid: int) -> set[int]:
    """The groups of a running command's processes: an engine leads one, and takes half a minute to see that it is
    not needed while it starts. None if psutil is not here; no engine runs without."""
    try:
        import psutil
    except ImportError:
        return set()
    found = set()
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(ProcessLookupError):
                found.add(os.getpgid(child.pid))
    return found


def _figures(answer: str) -> dict[str, Any] | None:
    try:
        found = json.loads(answer.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return found if isinstance(found, dict) else None


def judged(check: Check, figures: Mapping[str, Any], seconds: float, *, dry: bool) -> Result:
    """A dry run is held to what holds everywhere. Of other limits there have to be figures: those of a toy on a CPU say
    nothing."""
    try:
        is_met = all(limit.is_met(figures) or (dry and not limit.everywhere) for limit in check.limits)
        line = "; ".join(limit.line(figures) for limit in check.limits)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"its figures lack {error}"
        return Result(name=check.name, outcome="failed", seconds=seconds, line=missing, figures=figures)
    if dry and is_met:
        line = "it runs"
    return Result(name=check.name, outcome="met" if is_met else "missed", seconds=seconds, line=line, figures=figures)


# -- what a machine may lack ----------------------------------------------------------------------------------------


def needs(has: Callable[[Any], bool], what: str) -> Callable[[], str]:
    """`has` is asked of torch.cuda."""

    def lacks() -> str:
        import torch

        return "" if has(torch.cuda) else f"needs {what}"

    return lacks


def memory(gib: int) -> Callable[[], str]:
    return needs(lambda cuda: cuda.get_device_properties(0).total_memory >= gib * GIB, f"a card of {gib} GiB")


def vllm_for_gpus() -> str:
    from swarm.sampler.choice import gpu_build

    return "" if gpu_build() else "vllm's own build is not installed: what is here is for CPUs"


def all_of(*needs: Callable[[], str]) -> Callable[[], str]:
    return lambda: next(filter(None, (lacks() for lacks in needs)), "")


# -- limits --------------------------------------------------------------------------------------------------------

MFU = Limit(path="mfu.mfu", least=0.3), Limit(path="mfu.tokens_per_s")  # 30 % is what others plan a learner with
ESTIMATE = Limit(path="memory.*.estimate_ratio", least=0.85, most=1.15), Limit(path="memory.*.step_s")

BF16_KL = 0.01  # Nats a token: half the square of a log-prob's error, of 0.14; on a CPU transformers has 0.0003
FLOAT32_KL = 1e-4  # Nats a token, of errors of 0.014: kernels may round what they multiply to the 10 bits of TF32
FP8_KL = 0.5  # Nats a token, as MISMATCH_KL in swarm/learner/alarms.py: a learner leaves out steps with more
SEEN = Limit(path="moved_kl", least=5 * BF16_KL, everywhere=True)  # What the mismatch would be with the version before
SWAPPED = (
    # A card's clock and memory vary by a percent or two; a kernel or a graph that is lost costs more.
    Limit(path="after_over_before", least=0.95),
    Limit(path="mismatch_kl_after_swaps", most=BF16_KL),
    Limit(path="tokens_per_s_before"),
    Limit(path="tokens_per_s_beneath_swaps"),
    Limit(path="install_s"),
    Limit(path="pause_s"),
)

MET = Limit(path="swaps_met", least=10)  # Of 20 beneath a sample
GRAPHS = Limit(path="replays_per_step_at_last", least=0.9)
"""A step replays one graph or many, but a prefill may do without. If a swap broke them, or there were none, it is 0."""


def agrees(most: float) -> tuple[Limit, ...]:
    return Limit(path="mismatch_kl", most=most, everywhere=True), SEEN


# -- checks --------------------------------------------------------------------------------------------------------


def learner(name: str, arguments: str, *, on_gpu: str, packages: str = "", **others: Any) -> Check:
    """`on_gpu` are arguments that only a GPU's run is given."""
    command = ("benchmarks.learner", "--json", *arguments.split())
    needed = (*LEARNER, *packages.split())
    gpu, dry = (*command, *on_gpu.split()), (*command, "--quick")
    return Check(name=name, command=gpu, dry=dry, packages=needed, **others)


def engine(
    name: str,
    arguments: str,
    *,
    dry: str = "",
    packages: str = "",
    needs: Callable[[], str] = lambda: "",
    **others: Any,
) -> Check:
    """`dry` are given after the arguments, and so replace them. On CPUs vLLM in bf16 has died in tests; there float32
    shows as much."""
    kind = name.partition("-")[0]
    command = ("benchmarks.gpu_engines", kind, *arguments.split())
    tiny = f"--parameters 3e5 --samples 4 --tokens 200 --dtype float32 {dry}".split()
    needed = (*ENGINE, *packages.split(), *(("vllm",) if kind == "vllm" else ()))
    needs = all_of(vllm_for_gpus, needs) if kind == "vllm" else needs
    gpu = (*command, "--device", "cuda")
    return Check(name=name, command=gpu, dry=(*command, *tiny), packages=needed, needs=needs, **others)


SHORT, FEW_SWAPS = "--samples 64 --tokens 200", "--swaps 3"
LOCKSTEP = "--samples 32 --tokens 128"  # transformers starts every kernel by itself: 1,000 tokens take half a minute
ON_24, ON_80 = memory(22), memory(70)
FLASH = all_of(ON_24, lambda: "" if find_spec("flash_attn") else "not installed: flash_attn")  # There is none for a CPU
NEWER = needs(lambda cuda: cuda.get_device_capability() >= (8, 9), "compute capability 8.9")
TWO_CARDS = needs(lambda cuda: cuda.device_count() >= 2, "two cards")
SAME = (*agrees(BF16_KL), *SWAPPED)
RANK = (  # FSDP rounds the weights once, and autocast each time: the gradients differ by as much.
    Limit(path="backend_is_nccl", least=1.0),
    Limit(path="gathers_in_bf16", least=1.0, everywhere=True),
    Limit(path="loss_apart", most=0.02, everywhere=True),
    Limit(path="grad_norm_apart", most=0.05, everywhere=True),
)
ROUNDED = (Limit(path="mismatch_kl", most=FP8_KL, everywhere=True),)


def peak(name: str, variants: str, limit_s: float, packages: str = "") -> Check:
    arguments = f"--parts memory --variants {variants}"
    same = {"on_gpu": "--device cuda", "packages": packages}
    return learner(name, arguments, limits=ESTIMATE, limit_s=limit_s, needs=ON_24, **same)


def mfu(name: str, on_gpu: str, limit_s: float, needs: Callable[[], str]) -> Check:
    return learner(name, "--parts mfu", on_gpu=f"--repeats 2 {on_gpu}", limits=MFU, limit_s=limit_s, needs=needs)


def adapter(name: str, arguments: str, limit_s: float, dry: str = "") -> Check:
    return engine(name, f"--adapter 32 {arguments}", dry=dry, packages="peft", limits=SAME, limit_s=limit_s)


def ranks(limit_s: float) -> Check:
    module = "benchmarks.gpu_rank"
    gpu, dry = (module, "--device", "cuda"), (module, "--device", "cpu")
    return Check(name="rank", command=gpu, dry=dry, limits=RANK, limit_s=limit_s, packages=LEARNER)


CHECKS = (
    mfu("mfu-0.6b", "", 45.0, ON_24),
    peak("memory", "chunked,checkpointed", 70.0),
    ranks(50.0),
    engine("vllm", "--swaps 20", dry=FEW_SWAPS, limits=(*SAME, MET, GRAPHS), limit_s=160.0),
    peak("adapter", "adapter", 45.0, "peft"),
    engine("transformers", f"{LOCKSTEP} {FEW_SWAPS}", limits=SAME, limit_s=110.0),
    # More swaps than there are slots for adapters.
    adapter("vllm-adapter", f"--swaps 8 {SHORT}", 150.0, dry=f"--adapter 4 {FEW_SWAPS}"),
    peak("memory-8bit", "8bit", 45.0, "bitsandbytes"),
    engine("vllm-float32", f"{SHORT} --dtype float32", limits=agrees(FLOAT32_KL), limit_s=100.0),
    mfu("mfu-1.7b", "--parameters 1.7e9", 75.0, ON_80),
    engine("transformers-float32", f"{LOCKSTEP} --dtype float32", limits=agrees(FLOAT32_KL), limit_s=75.0),
    # vLLM's build for CPUs rounds to whole numbers alone.
    engine("vllm-fp8", f"--precision fp8 {SHORT}", dry="--precision int8", limits=ROUNDED, limit_s=100.0, needs=NEWER),
    adapter("transformers-adapter", f"{LOCKSTEP} {FEW_SWAPS}", 120.0),
    mfu("mfu-0.6b-flash", "--attention flash_attention_2", 60.0, FLASH),
    engine("vllm-two-cards", f"--ranks 2 {SHORT} {FEW_SWAPS}", limits=SAME, limit_s=150.0, needs=TWO_CARDS),
)
"""In the order of their worth: whether a learner runs here, how fast, whether its memory is reckoned rightly, and
whether what samplers draw is what it believes. Times are guesses but of the first five without vLLM, which an H200 has
run."""


# -- the run -------------------------------------------------------------------------------------------------------


def about_this_machine() -> dict[str, Any]:
    import torch
    import transformers

    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {"cards": names, "torch": torch.__version__, "transformers": transformers.__version__}


def summed_up(results: Sequence[Result], seconds: float) -> str:
    counts = Counter(one.outcome for one in results)
    return ", ".join(f"{counts[one]} {one}" for one in get_args(Outcome) if counts[one]) + f" in {seconds:.0f} s"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], prog="bin/gpu-check")
    names = [check.name for check in CHECKS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--minutes", type=float, help=f"for all of them ({MINUTES:g}; of a dry run no limit)")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny models: does every line run?")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the figures go ({OUT})")
    options = parser.parse_args(arguments)
    lacking = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if lacking:
        parser.error(f"{sys.executable} has no {' and no '.join(lacking)}: PYTHON=/path/to/python names another one")
    if options.minutes is None:
        options.minutes = float("inf") if options.dry_run else MINUTES
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    options = _parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    about = about_this_machine()
    if not about["cards"] and not options.dry_run:
        print("torch sees no CUDA device here; --dry-run runs all of it on the CPU", file=sys.stderr)
        return 2
    print(f"on {', '.join(about['cards']) or 'a CPU'}, torch {about['torch']}", flush=True)
    results: list[Result] = []
    for check in CHECKS:
        if options.only and check.name not in options.only:
            continue
        result = run(check, dry=options.dry_run, left_s=began + 60 * options.minutes - time.monotonic())
        results.append(result)
        print(f"{result.name:<22} {result.outcome:<8} {result.seconds:6.0f} s  {result.line}", flush=True)
        written = {**about, "dry_run": options.dry_run, "checks": [asdict(one) for one in results]}
        options.out.write_text(json.dumps(written, indent=1))
    print(summed_up(results, time.monotonic() - began), flush=True)
    outcomes = {one.outcome for one in results}
    return int("met" not in outcomes or not outcomes.isdisjoint({"missed", "failed"}))


if __name__ == "__main__":
    sys.exit(main())

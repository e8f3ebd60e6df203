"""The embedded model: a Qwen3 of about 120,000 parameters and a tokenizer of single characters, made from a seed.

It lets a whole swarm run with no download. It has the architecture of real Qwen3 models (grouped queries, tied
embeddings), so whatever carries its weights carries theirs.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<pad>", "<bos>", "<eos>")
CHARACTERS = "0123456789="


def tiny_tokenizer() -> Any:
    """A fast tokenizer: one token a character, and <bos> before a prompt."""
    words = {word: i for i, word in enumerate((*SPECIAL, *CHARACTERS))}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", words["<bos>"])])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=64
    )


def tiny_model(seed: int) -> Any:
    """A random Qwen3, the same for the same seed."""
    config = Qwen3Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Small for its size, and the least that vLLM has a kernel for on CPUs.
        head_dim=32,
        max_position_embeddings=64,
        initializer_range=0.05,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config)

"""A run of strangers who try to be more than text: prompts, completions and names with mark-up and turned writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from swarm.learner.tiny import tiny_model

IMAGE = "<img src=x onerror=window.hacked=1>"
SCRIPT = "<script>window.hacked=1</script>"
FRAME = "<iframe srcdoc='&lt;script&gt;parent.hacked=1&lt;/script&gt;'></iframe>"
TURNED = "\u202e\u2066abc\u0000\u001b[31m"
LINK = "<a href=javascript:window.hacked=1>"
WORDS = (IMAGE, SCRIPT, FRAME, TURNED, LINK)
NICKNAME = "<img src=x onerror=hacked=1>\u202e"
"""At most 32 characters, as a node's owner may choose."""

SPECIAL = ("<pad>", "<bos>", "<eos>")


def _tokenizer() -> Any:
    """One token for each of WORDS: an engine without a model answers with the tokens of its prompt."""
    words = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("\n"), "removed")
    core.decoder = decoders.Fuse()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", model_max_length=64)


def hostile_model(directory: Path) -> Path:
    """Write a tiny model whose every token is one of WORDS."""
    config = tiny_model(0).config
    config.vocab_size = len(SPECIAL) + len(WORDS)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(directory)
    _tokenizer().save_pretrained(directory)
    return directory


def hostile_questions(path: Path) -> Path:
    """Write a data set whose prompts and answers are WORDS."""
    rows = [{"prompt": "\n".join((*WORDS, str(number))), "answer": f"{SCRIPT}{number}"} for number in range(400)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path

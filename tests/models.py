"""Tiny random models that real engines serve within seconds. Built once into a cache directory, reused afterwards."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

GEMMA3_WINDOW = 64
GEMMA3_VOCAB = 1000


def cache_root() -> Path:
    """Where built models live: `HMA_TEST_CACHE`, else a fixed directory under the system's temporary one."""
    return Path(os.environ.get("HMA_TEST_CACHE", Path(tempfile.gettempdir()) / f"hma-test-models-{os.getuid()}"))


def tiny_gemma3(kv_heads: int = 1) -> Path:
    """A Gemma 3 text model: 13 layers (11 sliding with window 64, 2 full), 2 heads a KV head of 32, random weights.

    Its groups are uneven: five sliding groups of two layers and one of one, and a full group of two.

    The vocabulary of 1,000 words `w0 … w999` has a word-level tokenizer, so text and id prompts both work.
    """
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    target = cache_root() / ("tiny-gemma3-13" if kv_heads == 1 else f"tiny-gemma3-13-{kv_heads}kv")
    if (target / "config.json").is_file():
        return target
    config = Gemma3TextConfig(
        vocab_size=GEMMA3_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=13,
        num_attention_heads=2 * kv_heads,
        num_key_value_heads=kv_heads,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=GEMMA3_WINDOW,
        max_position_embeddings=2048,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    return save_checkpoint(Gemma3ForCausalLM, config, target)


def tiny_qwen3() -> Path:
    """A Qwen 3 model with full attention only: not hybrid, so HMA brings nothing."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    target = cache_root() / "tiny-qwen3"
    if (target / "config.json").is_file():
        return target
    config = Qwen3Config(
        vocab_size=GEMMA3_VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        bos_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    return save_checkpoint(Qwen3ForCausalLM, config, target)


def save_checkpoint(model_class: type, config: object, target: Path) -> Path:
    """Write the checkpoint beside its final place and rename it, so that a half-written one is never used."""
    import torch

    torch.manual_seed(20240614)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / target.name
        model = model_class(config).to(torch.bfloat16)
        model.save_pretrained(built)
        _save_tokenizer(built)
        os.replace(built, target)
    return target


def _save_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    words = specials + [f"w{i}" for i in range(len(specials), GEMMA3_VOCAB)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
    ).save_pretrained(directory)


def without(directory: Path, name: str, target: Path) -> Path:
    """A copy of a model directory that lacks one file (for bad-input tests)."""
    target.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if path.name != name:
            (target / path.name).write_bytes(path.read_bytes())
    return target


def edit_config(directory: Path, target: Path, **changes: object) -> Path:
    """A copy of a model directory with changed keys in its config.json."""
    without(directory, "config.json", target)
    config = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target

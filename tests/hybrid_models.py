"""Tiny random hybrids of every kind, built once like those of `tests.models`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.models import GEMMA3_VOCAB, cache_root, save_checkpoint, tiny_gemma3

CHUNK = 128
WINDOW = 64
COMMON: dict[str, Any] = {
    "vocab_size": GEMMA3_VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def tiny_gpt_oss() -> Path:
    """gpt-oss: 5 layers, 3 of them sliding with window 64."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = {"num_hidden_layers": 5, "sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}
    return _built("tiny-gpt-oss", GptOssForCausalLM, GptOssConfig, **config)


def tiny_llama4() -> Path:
    """Llama 4: 6 layers, 5 with chunks of 128 tokens and one with full attention."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = {
        "num_hidden_layers": 6,
        "attention_chunk_size": CHUNK,
        "intermediate_size_mlp": 128,
        "num_local_experts": 2,
        "interleave_moe_layer_step": 2,
    }
    return _built("tiny-llama4", Llama4ForCausalLM, Llama4TextConfig, **config)


def tiny_qwen3_next() -> Path:
    """Qwen3-Next: 6 layers, 5 gated delta nets with heads of 128 and one with full attention."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    config = {
        "num_hidden_layers": 6,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    return _built("tiny-qwen3-next", Qwen3NextForCausalLM, Qwen3NextConfig, **config)


def tiny_falcon_h1() -> Path:
    """Falcon-H1: 3 layers, each with attention and a Mamba-2 state."""
    from transformers import FalconH1Config, FalconH1ForCausalLM

    config = {
        "num_hidden_layers": 3,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
    }
    return _built("tiny-falcon-h1", FalconH1ForCausalLM, FalconH1Config, **config)


def tiny_nemotron_h() -> Path:
    """Nemotron-H: two Mamba-2 layers, one of attention, one without a cache."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    config = {
        "hybrid_override_pattern": "M*M-",
        "num_hidden_layers": 4,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 1,
    }
    return _built("tiny-nemotron-h", NemotronHForCausalLM, NemotronHConfig, **config)


HYBRIDS: dict[str, Callable[[], Path]] = {
    "gemma3": tiny_gemma3,
    "gpt_oss": tiny_gpt_oss,
    "llama4": tiny_llama4,
    "qwen3_next": tiny_qwen3_next,
    "falcon_h1": tiny_falcon_h1,
    "nemotron_h": tiny_nemotron_h,
}


def _built(name: str, model_class: type, config_class: type, **config: Any) -> Path:
    target = cache_root() / name
    if not (target / "config.json").is_file():
        save_checkpoint(model_class, config_class(**(COMMON | config)), target)
    return target

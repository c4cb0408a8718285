"""What a configuration class fills in where config.json is silent.

Published files leave out what equals their class's default (gemma-3-4b-it names neither heads nor head size), so a
reader without transformers must know these. The classes are transformers' (`models/*/configuration_*.py`), except where
vLLM brings its own (`vllm/transformers_utils/configs`). A test compares the table with the installed transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# A class default says nothing about one model here: without these in the file there is no model to plan for.
ESSENTIAL = frozenset({"num_hidden_layers", "hidden_size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigClass:
    """model_type: the key that selects it. defaults: of the fields that decide the cache; None is a default, too.

    constants: keys that are no fields of the class, but constants in its code (a layer pattern, say).
    """

    model_type: str
    name: str
    defaults: Mapping[str, object] = field(default_factory=dict)
    constants: Mapping[str, object] = field(default_factory=dict)
    in_transformers: bool = True


_WINDOWED_QWEN = {"use_sliding_window": False, "sliding_window": 4096}
_GATED_DELTA = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MAMBA2 = {"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
_MAMBA1 = {"state_size": 16, "conv_kernel": 4, "expand": 2}


def _heads(heads: int, kv_heads: int | None, head_dim: int | None = None) -> dict[str, object]:
    return {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}


def _class(
    model_type: str, name: str, *defaults: Mapping[str, object], constants: Mapping[str, object] | None = None
) -> ConfigClass:
    merged = {key: value for part in defaults for key, value in part.items()}
    return ConfigClass(model_type=model_type, name=name, defaults=merged, constants=constants or {})


_IN_TRANSFORMERS = (
    _class("llama", "LlamaConfig", _heads(32, None)),
    _class("mistral", "MistralConfig", _heads(32, 8), {"sliding_window": 4096}),
    _class("ministral", "MinistralConfig", _heads(32, 8), {"sliding_window": 4096}),
    _class("ministral3", "Ministral3Config", _heads(32, 8, 128), {"sliding_window": None}),
    _class("mixtral", "MixtralConfig", _heads(32, 8), {"sliding_window": None}),
    _class("phi3", "Phi3Config", _heads(32, None), {"sliding_window": None}),
    _class("qwen2", "Qwen2Config", _heads(32, 32), _WINDOWED_QWEN, {"max_window_layers": 28}),
    _class("qwen2_moe", "Qwen2MoeConfig", _heads(16, 16), _WINDOWED_QWEN, {"max_window_layers": 28}),
    _class("qwen3", "Qwen3Config", _heads(32, 32, 128), _WINDOWED_QWEN, {"max_window_layers": 28}),
    _class("qwen3_moe", "Qwen3MoeConfig", _heads(32, 4), _WINDOWED_QWEN),
    _class("gemma", "GemmaConfig", _heads(16, 16, 256)),
    _class("gemma2", "Gemma2Config", _heads(8, 4, 256), {"sliding_window": 4096}),
    _class(
        "gemma3_text",
        "Gemma3TextConfig",
        _heads(8, 4, 256),
        {"sliding_window": 4096},
        constants={"sliding_window_pattern": 6},
    ),
    _class(
        "gemma3n_text",
        "Gemma3nTextConfig",
        _heads(8, 2, 256),
        {"sliding_window": 512, "num_kv_shared_layers": 15},
    ),
    _class(
        "gemma4_text",
        "Gemma4TextConfig",
        _heads(8, 4, 256),
        {"sliding_window": 512, "num_kv_shared_layers": 0, "attention_k_eq_v": False},
        constants={"global_head_dim": 512, "num_global_key_value_heads": None},
    ),
    _class("cohere", "CohereConfig", _heads(64, None)),
    _class(
        "cohere2",
        "Cohere2Config",
        _heads(64, None),
        {"sliding_window": 4096},
        constants={"sliding_window_pattern": 4},
    ),
    _class("exaone4", "Exaone4Config", _heads(32, 32), {"sliding_window": 4096, "sliding_window_pattern": 4}),
    _class("olmo2", "Olmo2Config", _heads(32, None)),
    _class("olmo3", "Olmo3Config", _heads(32, None), {"sliding_window": 4096}),
    _class(
        "smollm3",
        "SmolLM3Config",
        _heads(16, 4),
        {"use_sliding_window": False, "sliding_window": None, "no_rope_layer_interval": 4},
    ),
    _class("granite", "GraniteConfig", _heads(32, None)),
    _class("granitemoe", "GraniteMoeConfig", _heads(32, None)),
    _class("gpt_oss", "GptOssConfig", _heads(64, 8, 64), {"sliding_window": 128}),
    _class(
        "llama4_text",
        "Llama4TextConfig",
        _heads(40, 8, 128),
        {"no_rope_layer_interval": 4, "attention_chunk_size": 8192},
    ),
    _class("qwen3_next", "Qwen3NextConfig", _heads(16, 2), _GATED_DELTA, constants={"full_attention_interval": 4}),
    _class("qwen3_5_text", "Qwen3_5TextConfig", _heads(16, 4), _GATED_DELTA, constants={"full_attention_interval": 4}),
    _class(
        "qwen3_5_moe_text",
        "Qwen3_5MoeTextConfig",
        _heads(16, 2),
        _GATED_DELTA,
        constants={"full_attention_interval": 4},
    ),
    _class(
        "jamba",
        "JambaConfig",
        _heads(32, 8),
        {"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2},
    ),
    _class("falcon_h1", "FalconH1Config", _heads(32, 8), _MAMBA2, {"mamba_d_ssm": 1024, "mamba_expand": 2}),
    _class("granitemoehybrid", "GraniteMoeHybridConfig", _heads(32, None), _MAMBA2, {"mamba_expand": 2}),
    _class("lfm2", "Lfm2Config", _heads(32, 8), {"conv_L_cache": 3}),
    _class("lfm2_moe", "Lfm2MoeConfig", _heads(32, 8), {"conv_L_cache": 3}),
    _class("mamba", "MambaConfig", _MAMBA1),
    _class("falcon_mamba", "FalconMambaConfig", _MAMBA1),
    _class(
        "mamba2",
        "Mamba2Config",
        {"num_heads": 128, "head_dim": 64, "state_size": 128, "n_groups": 8, "conv_kernel": 4, "expand": 2},
    ),
    _class(
        "nemotron_h",
        "NemotronHConfig",
        _heads(32, 8, 128),
        {"sliding_window": None, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64},
        {"n_groups": 8, "conv_kernel": 4, "mamba_ssm_cache_dtype": "float32"},
    ),
    _class("deepseek_v2", "DeepseekV2Config", _heads(32, None), {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    _class("deepseek_v3", "DeepseekV3Config", _heads(128, 128), {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    # vLLM reads these two with DeepseekV3Config as well, which has no default for an indexer.
    _class("deepseek_v32", "DeepseekV3Config", _heads(128, 128), {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    _class("kimi_k2", "DeepseekV3Config", _heads(128, 128), {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    _class(
        "mimo_v2_flash",
        "MiMoV2FlashConfig",
        _heads(64, 4, 192),
        {"v_head_dim": 128},
    ),
)

_ELSEWHERE = (
    ConfigClass(
        model_type="deepseek_v4",
        name="vLLM's DeepseekV4Config",
        constants={"vision_n_layers": 0},
        in_transformers=False,
    ),
    ConfigClass(
        model_type="kimi_linear",
        name="vLLM's KimiLinearConfig",
        constants={"num_attention_heads": 32},
        in_transformers=False,
    ),
    ConfigClass(
        model_type="step3p5",
        name="vLLM's Step3p5Config",
        constants={"num_attention_heads": 40, "num_attention_groups": 8, "head_dim": None},
        in_transformers=False,
    ),
    # Their classes come with the checkpoint's own code: what the file leaves out is not known.
    ConfigClass(model_type="mimo", name="MiMoConfig", in_transformers=False),
    ConfigClass(model_type="mimo_v2", name="MiMoV2Config", in_transformers=False),
)

CLASSES = {entry.model_type: entry for entry in (*_IN_TRANSFORMERS, *_ELSEWHERE)}


def default_of(entry: ConfigClass, key: str) -> tuple[bool, object]:
    """Whether the table has a default for the field, and the default."""
    for table in (entry.defaults, entry.constants):
        if key in table:
            return True, table[key]
    return False, None


def installed_default(entry: ConfigClass, key: str) -> tuple[object, str]:
    """The default of the installed transformers' class and where it comes from; (None, "") where there is none.

    Takes a second where transformers is installed, so it is the last resort before an error.
    """
    from dataclasses import MISSING, fields
    from importlib import metadata
    from importlib.util import find_spec

    if find_spec("transformers") is None:
        return None, ""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if entry.model_type not in CONFIG_MAPPING:
        return None, ""
    for item in fields(CONFIG_MAPPING[entry.model_type]):
        if item.name == key and item.default is not MISSING and item.default is not None:
            return item.default, f"class default of {entry.name} in transformers {metadata.version('transformers')}"
    return None, ""

"""From a config.json to the caches of its layers: one checked rule for each architecture that vLLM 0.32 builds.

An architecture without a rule is refused by name. Rules are functions of a `Rank`; they read the language model's
fields, whose origins the config keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from connector.errors import ConfigError, HmaError, ModelError
from hma_cli.models.architectures import deepseek_v4, dense, gemma, hybrid, interleaved, latent, uneven
from hma_cli.models.architectures.rank import Indivisible, Rank, rank_of
from hma_cli.models.architectures.removed import LAST_VERSION
from hma_cli.models.caches import Layer
from hma_cli.models.config import ModelConfig
from hma_cli.models.options import RankOptions

# Sizes that are tried when the given one does not divide the model, to name those that do.
_TRIED_TP = (*range(1, 17), 24, 32, 40, 48, 64, 80, 96, 128)


@dataclass(frozen=True, slots=True)
class Rule:
    """layers: the rule. model_types: of the language model, that it was checked with; the first is the default."""

    layers: Callable[[Rank], tuple[Layer, ...]]
    model_types: tuple[str, ...]


RULES = {
    "CohereForCausalLM": Rule(dense.uniform, ("cohere",)),
    "Cohere2ForCausalLM": Rule(interleaved.cohere2, ("cohere2",)),
    "DeepseekV2ForCausalLM": Rule(latent.deepseek, ("deepseek_v2",)),
    "DeepseekV3ForCausalLM": Rule(latent.deepseek, ("deepseek_v3", "kimi_k2")),
    "DeepseekV32ForCausalLM": Rule(latent.deepseek_v32, ("deepseek_v32",)),
    "DeepseekV4ForCausalLM": Rule(deepseek_v4.deepseek_v4, ("deepseek_v4",)),
    "Exaone4ForCausalLM": Rule(interleaved.exaone4, ("exaone4",)),
    "FalconH1ForCausalLM": Rule(hybrid.falcon_h1, ("falcon_h1",)),
    "FalconMambaForCausalLM": Rule(hybrid.mamba, ("falcon_mamba",)),
    "GemmaForCausalLM": Rule(dense.uniform, ("gemma",)),
    "Gemma2ForCausalLM": Rule(interleaved.gemma2, ("gemma2",)),
    "Gemma3ForCausalLM": Rule(interleaved.gemma3, ("gemma3_text",)),
    "Gemma3ForConditionalGeneration": Rule(interleaved.gemma3, ("gemma3_text",)),
    "Gemma3nForCausalLM": Rule(gemma.gemma3n, ("gemma3n_text",)),
    "Gemma3nForConditionalGeneration": Rule(gemma.gemma3n, ("gemma3n_text",)),
    "Gemma4ForCausalLM": Rule(gemma.gemma4, ("gemma4_text",)),
    "Gemma4ForConditionalGeneration": Rule(gemma.gemma4, ("gemma4_text",)),
    "GptOssForCausalLM": Rule(interleaved.gpt_oss, ("gpt_oss",)),
    "GraniteForCausalLM": Rule(dense.windowed, ("granite",)),
    "GraniteMoeForCausalLM": Rule(dense.granite_moe, ("granitemoe",)),
    "GraniteMoeHybridForCausalLM": Rule(hybrid.granite_hybrid, ("granitemoehybrid",)),
    "JambaForCausalLM": Rule(hybrid.jamba, ("jamba",)),
    "KimiLinearForCausalLM": Rule(latent.kimi_linear, ("kimi_linear",)),
    "Lfm2ForCausalLM": Rule(hybrid.lfm2, ("lfm2",)),
    "Lfm2MoeForCausalLM": Rule(hybrid.lfm2_moe, ("lfm2_moe",)),
    "LlamaForCausalLM": Rule(dense.windowed, ("llama", "mistral")),
    "Llama4ForCausalLM": Rule(interleaved.llama4, ("llama4_text",)),
    "Llama4ForConditionalGeneration": Rule(interleaved.llama4, ("llama4_text",)),
    "MambaForCausalLM": Rule(hybrid.mamba, ("mamba",)),
    "Mamba2ForCausalLM": Rule(hybrid.mamba2, ("mamba2",)),
    "MiMoForCausalLM": Rule(dense.qwen2, ("mimo",)),
    "MiMoV2ForCausalLM": Rule(uneven.mimo_v2, ("mimo_v2", "mimo_v2_flash")),
    "MiMoV2FlashForCausalLM": Rule(uneven.mimo_v2, ("mimo_v2_flash", "mimo_v2")),
    "MinistralForCausalLM": Rule(interleaved.ministral, ("ministral",)),
    "Ministral3ForCausalLM": Rule(dense.windowed, ("ministral3",)),
    "MistralForCausalLM": Rule(dense.windowed, ("mistral", "ministral3")),
    "MixtralForCausalLM": Rule(dense.uniform, ("mixtral",)),
    "NemotronHForCausalLM": Rule(hybrid.nemotron_h, ("nemotron_h",)),
    "Olmo2ForCausalLM": Rule(dense.uniform, ("olmo2",)),
    "Olmo3ForCausalLM": Rule(interleaved.olmo3, ("olmo3",)),
    "Phi3ForCausalLM": Rule(dense.windowed, ("phi3",)),
    "Qwen2ForCausalLM": Rule(dense.qwen2, ("qwen2",)),
    "Qwen2MoeForCausalLM": Rule(dense.qwen2_moe, ("qwen2_moe",)),
    "Qwen3ForCausalLM": Rule(dense.qwen3, ("qwen3",)),
    "Qwen3MoeForCausalLM": Rule(dense.qwen3_moe, ("qwen3_moe",)),
    "Qwen3NextForCausalLM": Rule(hybrid.qwen3_next, ("qwen3_next",)),
    "Qwen3_5ForCausalLM": Rule(hybrid.qwen3_5, ("qwen3_5_text",)),
    "Qwen3_5ForConditionalGeneration": Rule(hybrid.qwen3_5, ("qwen3_5_text",)),
    "Qwen3_5MoeForCausalLM": Rule(hybrid.qwen3_5, ("qwen3_5_moe_text",)),
    "Qwen3_5MoeForConditionalGeneration": Rule(hybrid.qwen3_5, ("qwen3_5_moe_text",)),
    "SmolLM3ForCausalLM": Rule(interleaved.smollm3, ("smollm3",)),
    "Step3p5ForCausalLM": Rule(uneven.step3p5, ("step3p5",)),
}

# Architectures whose rule knows what `per_layer_config` means.
_HETEROGENEOUS = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")


def layers_of(config: ModelConfig, options: RankOptions) -> tuple[Layer, ...]:
    """What the layers keep on one rank, in the order in which vLLM builds them. `config.used` tells from what.

    ModelError for an architecture without a rule and for fields that are missing or senseless; ConfigError for options
    that do not fit the model, with the tensor parallel sizes that do.
    """
    rule = _rule_of(config)
    try:
        return _apply(rule, config, options)
    except Indivisible as error:
        raise ConfigError(error.message, remedy=_working_sizes(rule, config, options)) from error


def _apply(rule: Rule, config: ModelConfig, options: RankOptions) -> tuple[Layer, ...]:
    text = config.language_model(rule.model_types)
    if text.has("per_layer_config") and config.architecture not in _HETEROGENEOUS:
        raise text.error(
            "per_layer_config",
            "is set",
            f"layers that differ, which the rule for {config.architecture} has not been checked with",
            "Plan the model from a running server.",
        )
    layers = rule.layers(rank_of(config, text, options))
    if not layers:
        raise ModelError(
            f"{config.name}: no layer keeps a cache.", remedy="Check the layer pattern in its config.json."
        )
    return layers


def _rule_of(config: ModelConfig) -> Rule:
    name = config.architecture
    if name in RULES:
        return RULES[name]
    if name in LAST_VERSION:
        raise ModelError(
            f"{config.name}: vLLM 0.32 has no {name} any more; the last version with it was {LAST_VERSION[name]}.",
            remedy="Plan a model that vLLM 0.32 serves.",
        )
    from difflib import get_close_matches

    near = get_close_matches(name, RULES, n=1, cutoff=0.8)
    raise ModelError(
        f"{config.name}: there is no rule for {name}, so what its layers keep is not known."
        + (f" Did you mean {near[0]}?" if near else ""),
        remedy=f"Known architectures: {', '.join(RULES)}.",
    )


def _working_sizes(rule: Rule, config: ModelConfig, options: RankOptions) -> str:
    sizes = [size for size in _TRIED_TP if _works(rule, config, replace(options, tp=size))]
    return f"Tensor parallel sizes that work: {', '.join(map(str, sizes))}." if sizes else "No size works."


def _works(rule: Rule, config: ModelConfig, options: RankOptions) -> bool:
    try:
        _apply(rule, config, options)
    except HmaError:
        return False
    return True

"""Architectures that older vLLM versions served and 0.32 refuses (vLLM's registry, `_PREVIOUSLY_SUPPORTED_MODELS`)."""

from __future__ import annotations

_BY_LAST_VERSION = {
    "0.9.2": "Phi3SmallForCausalLM",
    "0.10.2": "DonutForConditionalGeneration MllamaForConditionalGeneration MotifForCausalLM Phi4FlashForCausalLM",
    "0.12.0": "Phi4MultimodalForCausalLM",
    "0.22.0": "JAISLMHeadModel",
    "0.23.0": """
        BaiChuanForCausalLM BaichuanForCausalLM BambaForCausalLM Dots1ForCausalLM ErnieForSequenceClassification
        ErnieForTokenClassification ErnieModel InternLM2VEForCausalLM InternLMForCausalLM MiniMaxForCausalLM
        MiniMaxM1ForCausalLM MiniMaxText01ForCausalLM MiniMaxVL01ForConditionalGeneration QWenLMHeadModel
        QwenVLForConditionalGeneration Tarsier2ForConditionalGeneration XverseForCausalLM
    """,
    "0.24.0": """
        AquilaForCausalLM AquilaModel AyaVisionForConditionalGeneration Grok1ForCausalLM Grok1ModelForCausalLM
        MantisForConditionalGeneration MusicFlamingoForConditionalGeneration TarsierForConditionalGeneration
    """,
    "0.25.0": "FuyuForCausalLM PersimmonForCausalLM TeleChatForCausalLM",
    "0.26.0": "OuroForCausalLM Plamo2ForCausalLM",
    "0.28.0": """
        ArcticForCausalLM ChameleonForConditionalGeneration Cheers CheersForConditionalGeneration
        Fairseq2LlamaForCausalLM FireRedLIDForConditionalGeneration GritLM HCXVisionForCausalLM MPTForCausalLM
        MptForCausalLM PrithviGeoSpatialMAE RWForCausalLM StableLMEpochForCausalLM
    """,
}

LAST_VERSION = {name: version for version, names in _BY_LAST_VERSION.items() for name in names.split()}

"""One rank of a model: its data types, and the caches that its layers keep, divided as vLLM divides them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from connector.errors import ConfigError
from connector.plan.kinds import ChunkedLocal, Full, Mla, SlidingWindow, State
from hma_cli.models.caches import Attention, Latent, Recurrent
from hma_cli.models.config import ModelConfig
from hma_cli.models.fields import MAX_LAYERS, Fields
from hma_cli.models.options import AUTO, KV_DTYPES, MODEL_DTYPES, RankOptions

# vLLM's `_FLOAT16_NOT_SUPPORTED_MODELS` (config/model.py), of the types that have a rule here.
_NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text")
_TORCH_DTYPES = (*MODEL_DTYPES, "float64", "float8_e4m3fn", "float8_e5m2")
# Names by which vLLM knows a checkpoint's quantized KV cache (utils/torch_utils.py).
_MODELOPT_KV = {"fp8": "fp8_e4m3"}


class Indivisible(ConfigError):
    """This number of ranks does not work for the model; another may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """text: the language model's fields. dtype, kv_dtype: resolved names, `auto` no more."""

    config: ModelConfig
    text: Fields
    options: RankOptions
    dtype: str
    kv_dtype: str

    @property
    def tp(self) -> int:
        return self.options.tp

    @property
    def item_bytes(self) -> int:
        """Bytes of one weight, and of one element of a state whose dtype is `auto`."""
        return MODEL_DTYPES[self.dtype]

    @property
    def kv_item_bytes(self) -> int:
        return KV_DTYPES[self.kv_dtype]

    def num_layers(self) -> int:
        return self.text.integer("num_hidden_layers", "the number of layers", high=MAX_LAYERS)

    def divide(self, what: str, total: int) -> int:
        """`total` of something over the ranks, which must come out even."""
        if total % self.tp:
            raise Indivisible(f"{self.config.name}: {total} {what} cannot be split over {self.tp} ranks.")
        return total // self.tp

    def attention(
        self,
        kind: Full | SlidingWindow | ChunkedLocal,
        *,
        heads: int,
        kv_heads: int,
        head_size: int,
        head_size_v: int | None = None,
        replicate: bool = True,
    ) -> Attention:
        """Keys and values of one attention layer. heads, kv_heads: in the whole model.

        With more ranks than KV heads each rank keeps one head, and several keep the same (`max(1, total // tp)`);
        `replicate` is False for models that vLLM does not build that way.
        """
        if heads % kv_heads:
            raise self.text.error(
                "num_key_value_heads",
                f"is {kv_heads}, which does not divide {heads} attention heads",
                "the heads that share a key",
                "Both must come from the same checkpoint.",
            )
        self.divide("attention heads", heads)
        shared = replicate and kv_heads < self.tp and self.tp % kv_heads == 0
        return Attention(
            kind=kind,
            heads=1 if shared else self.divide("KV heads", kv_heads),
            total_heads=kv_heads,
            head_size=head_size,
            head_size_v=head_size if head_size_v is None else head_size_v,
            item_bytes=self.kv_item_bytes,
        )

    def latent(
        self,
        state_bytes: int,
        *,
        window: int | None = None,
        tokens_per_state: int = 1,
        block_size: int | None = None,
        page_multiple: int = 1,
    ) -> Latent:
        """A cache that every rank keeps whole."""
        return Latent(
            kind=Mla(window),
            state_bytes=state_bytes,
            tokens_per_state=tokens_per_state,
            block_size=block_size,
            page_multiple=page_multiple,
        )

    def recurrent(self, family: str, *shapes: tuple[int, ...], item_bytes: tuple[int, ...]) -> Recurrent:
        return Recurrent(kind=State(), family=family, shapes=shapes, item_bytes=item_bytes)

    def ssm_item_bytes(self, rule: str | None = None, origin: str = "") -> int:
        """Bytes of an element of the recurrent state proper: `--mamba-ssm-cache-dtype`, else the model family's own
        rule, else the model's dtype (MambaStateDtypeCalculator in vLLM's mamba_utils.py)."""
        if self.options.ssm_dtype != AUTO:
            name, origin = self.options.ssm_dtype, "--ssm-dtype"
        elif rule not in (None, AUTO):
            name = str(rule)
        else:
            name, origin = self.dtype, "the model's dtype"
        self.text.record("state dtype", name, origin)
        return MODEL_DTYPES[name]


def rank_of(config: ModelConfig, text: Fields, options: RankOptions) -> Rank:
    """The rank, its data types resolved as vLLM's `_get_and_verify_dtype` and `resolve_kv_cache_dtype_string` do."""
    dtype = _model_dtype(config, text, options)
    return Rank(config=config, text=text, options=options, dtype=dtype, kv_dtype=_kv_dtype(config, dtype, options))


def _model_dtype(config: ModelConfig, text: Fields, options: RankOptions) -> str:
    if options.model_dtype is not None:
        config.root.record("dtype", options.model_dtype, "--dtype")
        if options.model_dtype == "float16" and config.values.get("model_type") in _NO_FLOAT16:
            raise ConfigError(
                f"{config.name}: vLLM does not serve this model in float16, which is numerically unstable for it.",
                remedy="Use bfloat16 or float32.",
            )
        return options.model_dtype
    for fields in (config.root, text):
        for key in ("dtype", "torch_dtype"):
            if fields.has(key):
                name = fields.word(key, "the bytes of one element", _TORCH_DTYPES)
                return _served_dtype(fields, key, str(name), config)
    config.root.record("dtype", "bfloat16", "not in config.json: vLLM reads it from the weights; 16 bits assumed")
    return "bfloat16"


def _served_dtype(fields: Fields, key: str, name: str, config: ModelConfig) -> str:
    """vLLM serves in 16 bits whatever the file says, unless --dtype float32 is given (`_resolve_auto_dtype`)."""
    unstable = name == "float16" and config.values.get("model_type") in _NO_FLOAT16
    if name in ("bfloat16", "float16") and not unstable:
        return name
    fields.record(key, "bfloat16", f"config.json says {name}, which vLLM's --dtype auto serves as bfloat16")
    return "bfloat16"


def _kv_dtype(config: ModelConfig, dtype: str, options: RankOptions) -> str:
    if options.kv_dtype == "fp8_ds_mla":
        raise ConfigError(
            f"{config.name}: fp8_ds_mla is chosen by vLLM itself, for sparse latent attention.",
            remedy="Give --kv-dtype fp8.",
        )
    if options.kv_dtype != AUTO:
        config.root.record("KV cache dtype", options.kv_dtype, "--kv-dtype")
        return options.kv_dtype
    declared = _checkpoint_kv_dtype(config)
    if declared is not None:
        config.root.record("KV cache dtype", declared, "quantization_config in config.json")
        return declared
    config.root.record("KV cache dtype", dtype, "the model's dtype")
    return dtype


def _checkpoint_kv_dtype(config: ModelConfig) -> str | None:
    """The KV cache dtype that a quantized checkpoint asks for: ModelOpt's, or any KV scheme of llm-compressor (fp8)."""
    quantization = config.values.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    method = quantization.get("quant_method")
    inner = quantization.get("quantization", quantization)
    if isinstance(method, str) and method.startswith("modelopt") and isinstance(inner, Mapping):
        asked = next(
            (
                part[key]
                for key in ("kv_cache_scheme", "kv_cache_quant_algo")
                for part in (inner, quantization)
                if part.get(key)
            ),
            None,
        )
        if isinstance(asked, Mapping):
            asked = _modelopt_scheme(asked)
        if isinstance(asked, str) and asked.lower() == "nvfp4":
            raise ConfigError(
                f"{config.name}: the checkpoint asks for an nvfp4 KV cache, whose pages are not computed here.",
                remedy="Give the data type yourself, for example --kv-dtype fp8.",
            )
        return _MODELOPT_KV.get(asked.lower()) if isinstance(asked, str) else None
    compressed = isinstance(method, str) and method.replace("_", "-") == "compressed-tensors"
    return "fp8" if compressed and quantization.get("kv_cache_scheme") is not None else None


def _modelopt_scheme(scheme: Mapping[str, object]) -> str | None:
    if scheme.get("type") != "float":
        return None
    if scheme.get("num_bits") == 8 and scheme.get("dynamic") is False:
        return "fp8"
    return "nvfp4" if scheme.get("num_bits") == 4 else None

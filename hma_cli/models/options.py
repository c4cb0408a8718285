"""What decides a rank's bytes besides the model: tensor parallelism and data types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from connector.errors import ConfigError

# Names that vLLM takes for weights and states, with bytes per element.
MODEL_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4}
# Names that vLLM takes for --kv-cache-dtype and whose bytes follow from the head size alone, with bytes per element.
KV_DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
AUTO = "auto"
MAX_TP = 4096

_ALIASES = {"half": "float16", "float": "float32"}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """tp: tensor parallel size. dtype: of weights and activations, None or `auto` for the model's own. kv_dtype: of
    keys and values, `auto` for the model's. ssm_dtype: of recurrent states, `auto` for the model family's rule (vLLM's
    --mamba-ssm-cache-dtype). ConfigError for values that vLLM does not take."""

    tp: int = 1
    dtype: str | None = None
    kv_dtype: str = AUTO
    ssm_dtype: str = AUTO

    def __post_init__(self) -> None:
        if isinstance(self.tp, bool) or not isinstance(self.tp, int) or not 1 <= self.tp <= MAX_TP:
            raise ConfigError(
                f"The tensor parallel size is {self.tp!r}.", remedy=f"Give a whole number from 1 to {MAX_TP}."
            )
        _require("weights' data type", self.dtype, (None, AUTO, *MODEL_DTYPES, *_ALIASES))
        _require("KV cache data type", self.kv_dtype, (AUTO, *KV_DTYPES, "fp8_ds_mla"))
        _require("state data type", self.ssm_dtype, (AUTO, *MODEL_DTYPES))

    @property
    def model_dtype(self) -> str | None:
        """The weights' data type that was asked for, None where the model decides."""
        return None if self.dtype in (None, AUTO) else _ALIASES.get(str(self.dtype), self.dtype)


def _require(what: str, value: _T, allowed: tuple[_T, ...]) -> None:
    if value not in allowed:
        names = ", ".join(str(name) for name in allowed if name is not None)
        raise ConfigError(f"{value!r} is not a {what} that can be planned.", remedy=f"Give one of: {names}.")

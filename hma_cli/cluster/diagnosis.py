"""Why a server did not start, from its last log lines: one sentence and a remedy for what is known. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hma_cli.cluster.readiness import plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """cause: one sentence with what the log says; remedy: the next step; hma_off: vLLM refused to turn HMA on."""

    cause: str
    remedy: str
    hma_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    pattern: re.Pattern[str]
    cause: str
    remedy: str
    hma_off: bool = False


_HMA_CAUSES = (
    (r"selects a KV connector that does not support it", "the KV connector does not support it"),
    (r"latency regression when using chunked local", "vLLM disables it for chunked local attention"),
)

_KNOWN = (
    _Known(
        pattern=re.compile(r"Hybrid KV cache manager was explicitly enabled but is not supported"),
        cause="vLLM cannot turn HMA on in this configuration{hma}.",
        remedy="Remove the setting that excludes it, or give --no-require-hma to launch without HMA.",
        hma_off=True,
    ),
    _Known(
        pattern=re.compile(r"Connector (?P<text>\S+) does not support HMA"),
        cause="The connector {text} cannot do HMA, which is on.",
        remedy="Use --connector hma or nixl, or turn HMA off: --no-require-hma -- --disable-hybrid-kv-cache-manager.",
        hma_off=True,
    ),
    _Known(
        pattern=re.compile(r"(?P<text>.*[Aa]ddress already in use.*)"),
        cause="A port was taken while the server started: {text}.",
        remedy="Launch again; free ports are picked anew.",
    ),
    _Known(
        pattern=re.compile(
            r"(?P<text>To serve at least one request.*?\)|.*max seq len.*larger than.*|No available memory.*)"
        ),
        cause="The KV space is too small for one request: {text}.",
        remedy="Raise --kv-space or lower --max-model-len.",
    ),
    _Known(
        pattern=re.compile(r"(?P<text>Available memory on node .*? GiB\))\."),
        cause="Too little memory: {text}.",
        remedy="Lower --kv-space, or free some memory.",
    ),
    _Known(
        pattern=re.compile(r"User-specified max_model_len \((?P<text>\d+)\) is greater than the derived"),
        cause="--max-model-len {text} is more than the model can do.",
        remedy="Lower --max-model-len.",
    ),
    _Known(
        pattern=re.compile(
            r"(?P<text>Model architectures .*? are not supported|.*does not recognize this architecture)"
        ),
        cause="vLLM cannot serve this model: {text}.",
        remedy="Give a model that the installed vLLM supports.",
    ),
    _Known(
        pattern=re.compile(r"Unsupported connector type: (?P<text>\w+)"),
        cause="vLLM does not know the connector {text}: its plugin was not loaded.",
        remedy="Install hma into the environment that runs vLLM, and let VLLM_PLUGINS name hma if it is set.",
    ),
    _Known(
        pattern=re.compile(r"error: (?P<text>(unrecognized arguments|argument|ambiguous option).*)"),
        cause="vLLM refuses its command line: {text}.",
        remedy="Correct what follows `--`.",
    ),
)
_EXCEPTION_NAME = re.compile(r"^([\w.]*(Error|Exception)): ")
_ERROR_LINE = re.compile(r"^([\w.]*(Error|Exception|IncompatiblePeer|PeerUnreachable)): (?P<text>.+)")


def diagnose(lines: tuple[str, ...]) -> Diagnosis | None:
    """What these log lines say about a failure; None when they hold no error.

    The first known text wins; otherwise the first exception that was raised (later ones are its consequences).
    """
    texts = [plain(line) for line in lines]
    for known in _KNOWN:
        for text in texts:
            if (match := known.pattern.search(text)) is not None:
                found = _EXCEPTION_NAME.sub("", match.groupdict().get("text", "") or "")
                cause = known.cause.format(text=found.strip().rstrip("."), hma=_hma_cause(texts))
                return Diagnosis(cause=cause, remedy=known.remedy, hma_off=known.hma_off)
    for text in texts:
        if (match := _ERROR_LINE.match(text)) is not None and not text.startswith("RuntimeError: Engine core init"):
            return Diagnosis(cause=f"{match['text'].strip().rstrip('.')}.", remedy="")
    return None


def hma_off_cause(lines: tuple[str, ...]) -> str:
    """Why HMA is off, as far as a log tells; an empty string where it does not."""
    return _hma_cause([plain(line) for line in lines]).removeprefix(": ")


def _hma_cause(texts: list[str]) -> str:
    for pattern, cause in _HMA_CAUSES:
        if any(re.search(pattern, text) for text in texts):
            return f": {cause}"
    return ""

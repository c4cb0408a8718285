"""The model to serve: found, readable, and measured before any server starts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from connector.errors import ModelError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_TIMEOUT = 10.0
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "tekken.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """name: how clients call it. source: what vLLM is given, a directory or a hub id. weight_bytes: 0 where unknown."""

    name: str
    source: str
    vocab_size: int
    window: int | None
    weight_bytes: int
    has_tokenizer: bool = True
    max_positions: int = 0
    windowed_layers: int = 0
    layers: int = 0

    def cost_without_hma(self, tokens: int) -> float:
        """How many times the KV space a request of `tokens` tokens takes when every layer keeps everything; 1.0 for a
        model without windows, or where its configuration does not list its layers.

        >>> model = Model(name="", source="", vocab_size=1, window=512, weight_bytes=0, windowed_layers=15, layers=18)
        >>> round(model.cost_without_hma(32768), 1)
        5.6
        """
        if not self.windowed_layers or self.window is None or tokens < 1:
            return 1.0
        kept = (self.layers - self.windowed_layers) * tokens + self.windowed_layers * min(tokens, self.window)
        return self.layers * tokens / kept


def resolve_model(wanted: str | None) -> Model:
    """Find a model: None is the embedded one, then a local directory, then a hub id. ModelError in one sentence."""
    if wanted is None:
        from hma_cli.models import embedded

        return _local(embedded.prepare(), embedded.NAME)
    path = Path(wanted).expanduser()
    try:
        exists = path.exists()
    except OSError as error:
        raise _unreadable(wanted, error) from error
    if exists:
        return _local(path, path.resolve().name)
    if wanted.startswith(("/", ".", "~")) or wanted.count("/") > 1:
        raise ModelError(f"There is no directory {wanted}.", remedy="Give a model directory or a hub id like org/name.")
    if not _HUB_ID.fullmatch(wanted):
        raise ModelError(
            f"'{wanted}' is neither a directory nor a hub id.",
            remedy="Give a model directory or a hub id like org/name.",
        )
    return _from_hub(wanted)


def _local(path: Path, name: str) -> Model:
    try:
        config = json.loads((path / "config.json").read_text())
        files = {file.name: file.stat().st_size for file in path.iterdir() if file.is_file()}
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} has no config.json, so it is not a model directory.",
            remedy="Give the directory that holds config.json and the weights.",
        ) from error
    except NotADirectoryError as error:
        raise ModelError(
            f"{path} is not a directory.", remedy="Give the directory that holds config.json and the weights."
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}/config.json is not JSON: {error}.", remedy="Fetch the model again.") from error
    return _measured(config, name=name, source=str(path), files=files)


def _from_hub(wanted: str) -> Model:
    """Fetch config.json alone, from the hub or its local cache, so that an unknown name is refused before any start."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        config = json.loads(Path(hf_hub_download(wanted, "config.json", etag_timeout=_HUB_TIMEOUT)).read_text())
    except GatedRepoError as error:
        raise ModelError(
            f"The hub asks for an accepted licence before it hands out {wanted}.",
            remedy="Accept it on the model's page and log in with `hf auth login`.",
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"The hub knows no model {wanted}, and there is no such directory.",
            remedy="Check the spelling, or log in with `hf auth login` if it is private.",
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"{wanted} is neither a directory nor in the local cache, and the hub cannot be reached.",
            remedy="Check the spelling, give a model directory, or leave --model out to serve the embedded model.",
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"The configuration of {wanted} cannot be fetched: {first}", remedy="Give a model directory instead."
        ) from error
    return _measured(config, name=wanted, source=wanted, files=_hub_files(wanted))


def _hub_files(wanted: str) -> dict[str, int]:
    """Names and sizes of the repository's files; empty where the hub does not tell (weights count as 0 then)."""
    from huggingface_hub import HfApi

    try:
        siblings = HfApi().model_info(wanted, files_metadata=True, timeout=_HUB_TIMEOUT).siblings or []
    except Exception:
        # Sizes only sharpen the memory check; whatever fails here (offline mode, proxies, rate limits) must not stop.
        return {}
    return {file.rfilename: file.size or 0 for file in siblings}


def _measured(config: Any, *, name: str, source: str, files: dict[str, int]) -> Model:
    if not isinstance(config, dict):
        raise ModelError(f"The config.json of {name} is not a JSON object.", remedy="Fetch the model again.")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    vocabulary = text.get("vocab_size") or config.get("vocab_size")
    if not isinstance(vocabulary, int) or vocabulary < 1:
        raise ModelError(f"The config.json of {name} names no vocab_size.", remedy="Give a text generation model.")
    window = text.get("sliding_window") or text.get("attention_chunk_size")
    kinds = text.get("layer_types")
    kinds = kinds if isinstance(kinds, list) else []
    positions = text.get("max_position_embeddings")
    weights = [size for file, size in files.items() if file.endswith(".safetensors")]
    weights = weights or [size for file, size in files.items() if file.endswith((".bin", ".gguf", ".pt"))]
    return Model(
        name=name,
        source=source,
        vocab_size=vocabulary,
        window=window if isinstance(window, int) and window > 0 else None,
        weight_bytes=sum(weights),
        has_tokenizer=not files or any(file in files for file in _TOKENIZERS),
        max_positions=positions if isinstance(positions, int) else 0,
        windowed_layers=sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds),
        layers=len(kinds),
    )


def _unreadable(path: object, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read: {error.strerror or error}.", remedy="Check its permissions.")

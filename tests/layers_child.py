"""The child process of `engine/test_layers_of_models.py`: the caches of models as vLLM itself builds them.

    python -m tests.layers_child < {"name": config, …}

Builds each model without weights (meta tensors) and prints {"name": [[kind, window, bytes], …], …} as its last line:
bytes of a token, or of a whole state.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

KINDS = {
    "FullAttentionSpec": "full",
    "SlidingWindowSpec": "sliding_window",
    "ChunkedLocalAttentionSpec": "chunked_local",
    "MLAAttentionSpec": "mla",
    "MambaSpec": "state",
}


def build(config: dict[str, Any], directory: Path) -> list[tuple[str, int | None, int]]:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    (directory / "config.json").write_text(json.dumps(config))
    path = str(directory)
    arguments = EngineArgs(
        model=path,
        tokenizer=path,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=4096,
    )
    settings = arguments.create_engine_config()
    with set_current_vllm_config(settings):
        if not model_parallel_is_initialized():
            init_distributed_environment(1, 0, f"file://{directory / 'rendezvous'}", 0, "gloo")
            initialize_model_parallel(1, 1)
        with set_default_torch_dtype(settings.model_config.dtype), torch.device("meta"):
            initialize_model(settings)
    if settings.cache_config.mamba_block_size is None:
        settings.cache_config.mamba_block_size = settings.cache_config.block_size
    found = []
    for layer in settings.compilation_config.static_forward_context.values():
        if not hasattr(layer, "get_kv_cache_spec") or getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(settings)
        kind = KINDS[type(spec).__name__]
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
        size = spec.page_size_bytes if kind == "state" else spec.real_page_size_bytes // spec.block_size
        found.append((kind, window, size))
    return found


def main() -> None:
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")
    with tempfile.TemporaryDirectory() as scratch:
        found = {}
        for index, (name, config) in enumerate(json.load(sys.stdin).items()):
            directory = Path(scratch) / str(index)
            directory.mkdir()
            found[name] = build(config, directory)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

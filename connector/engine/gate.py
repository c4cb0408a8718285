"""The version gate: vLLM's connector interface is checked once, at import, instead of failing in mid-request."""

from __future__ import annotations

import inspect
import os

from connector.errors import StackError

TESTED_VLLM = "0.32"
ALLOW_UNTESTED = "HMA_ALLOW_UNTESTED_VLLM"

# Every hook that the facade overrides or relies on, with the parameters that it is called with.
HOOKS: dict[str, tuple[str, ...]] = {
    "bind_connector_metadata": ("connector_metadata",),
    "register_kv_caches": ("kv_caches",),
    "start_load_kv": ("forward_context", "kwargs"),
    "wait_for_layer_load": ("layer_name",),
    "save_kv_layer": ("layer_name", "kv_layer", "attn_metadata", "kwargs"),
    "wait_for_save": (),
    "get_transfer_results": ("finished_req_ids",),
    "build_connector_worker_meta": (),
    "get_handshake_metadata": (),
    "set_xfer_handshake_metadata": ("metadata",),
    "get_kv_connector_stats": (),
    "get_loaded_kv_cache_group_ids": ("request",),
    "get_num_new_matched_tokens": ("request", "num_computed_tokens"),
    "update_state_after_alloc": ("request", "blocks", "num_external_tokens"),
    "build_connector_meta": ("scheduler_output",),
    "on_new_request": ("request",),
    "update_connector_output": ("connector_output",),
    "request_finished": ("request", "block_ids"),
    "shutdown": (),
}


def check_interface(base: type, version: str, tested: str = TESTED_VLLM) -> None:
    """StackError when this vLLM's connector interface is not the one that the connector was written for.

    Another minor version with an unchanged interface is refused too, unless HMA_ALLOW_UNTESTED_VLLM=1: what a hook
    means can change while its name stays.
    """
    wrong = [name for name, parameters in HOOKS.items() if _parameters(base, name) != parameters]
    if wrong:
        raise StackError(
            f"vLLM {version} has another connector interface; changed: {', '.join(wrong)}.",
            remedy=f"Install vLLM {tested}, or a version of hma that supports {version}.",
        )
    if not version.startswith(f"{tested}.") and os.environ.get(ALLOW_UNTESTED) != "1":
        raise StackError(
            f"vLLM {version} has not been tested with this connector.",
            remedy=f"Install vLLM {tested}, or set {ALLOW_UNTESTED}=1 to try it.",
        )


def _parameters(base: type, name: str) -> tuple[str, ...] | None:
    hook = getattr(base, name, None)
    return None if hook is None else tuple(inspect.signature(hook).parameters)[1:]

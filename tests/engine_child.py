"""One real vLLM engine in one process, driven over a pipe: the child half of `tests.engines`.

Reads one JSON object a line on stdin, answers one a line on the descriptor that the first argument names. Between
commands it steps the engine as a server core would, so that leases end and blocks are freed while nobody asks.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import traceback
from typing import Any

import psutil

PR_SET_PDEATHSIG = 1


def main() -> None:
    # A test run that is killed must not leave its engines behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    out = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    engine = ChildEngine(json.loads(sys.argv[2]))
    out.write(json.dumps({"ready": True}) + "\n")
    while True:
        ready, _, _ = select.select([sys.stdin], [], [], 0.002 if engine.busy else 0.05)
        if not ready:
            engine.idle_step()
            continue
        line = sys.stdin.readline()
        if not line:
            break
        command = json.loads(line)
        try:
            answer = getattr(engine, f"do_{command.pop('op')}")(**command)
        except Exception:
            answer = {"error": traceback.format_exc()}
        out.write(json.dumps(answer) + "\n")
    engine.close()


class ChildEngine:
    """Commands are methods named `do_*`; their keyword arguments and results are JSON."""

    def __init__(self, args: dict[str, Any]) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.metrics.loggers import StatLoggerBase

        child = self

        class Recorder(StatLoggerBase):
            def __init__(self, *_args: Any, **_kwargs: Any) -> None:
                pass

            def record(self, scheduler_stats: Any, *_args: Any, **_kwargs: Any) -> None:
                if scheduler_stats is not None and scheduler_stats.kv_connector_stats:
                    child.record(scheduler_stats.kv_connector_stats)

            def log_engine_initialized(self) -> None:
                pass

        self.stats: dict[str, Any] = {}
        self.finished: dict[str, Any] = {}
        self.engine = LLMEngine.from_engine_args(EngineArgs(**args, disable_log_stats=False), stat_loggers=[Recorder])
        self.core = self.engine.engine_core.engine_core
        self.scheduler = self.core.scheduler

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests())

    def record(self, data: dict[str, Any]) -> None:
        from connector.engine.metrics import HmaStats

        total = HmaStats(self.stats)
        total.aggregate(HmaStats(data))

    def idle_step(self) -> None:
        if self.busy:
            self._step()

    def close(self) -> None:
        self.core.shutdown()

    def do_add(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Queue requests: id, tokens, params (sampling), transfer (kv_transfer_params)."""
        from vllm import SamplingParams

        for request in requests:
            sampling = SamplingParams(
                **{"temperature": 0.0, "max_tokens": 4, "logprobs": 1, "ignore_eos": True, **request.get("params", {})}
            )
            if request.get("transfer"):
                sampling.extra_args = {"kv_transfer_params": request["transfer"]}
            self.engine.add_request(request["id"], {"prompt_token_ids": request["tokens"]}, sampling)
        return {"queued": len(requests)}

    def do_run(self, ids: list[str], timeout: float = 120.0) -> dict[str, Any]:
        """Step until these requests have ended; returns tokens, log-probabilities, params and reason of each."""
        import time

        deadline = time.monotonic() + timeout
        while any(request_id not in self.finished for request_id in ids):
            if time.monotonic() > deadline:
                return {"error": f"requests did not end within {timeout} s: {self._state(ids)}"}
            self._step()
        return {request_id: self.finished.pop(request_id) for request_id in ids}

    def do_step(self, count: int = 1) -> dict[str, Any]:
        """Step a number of times, whatever there is to do."""
        for _ in range(count):
            self._step()
        return {}

    def do_abort(self, ids: list[str]) -> dict[str, Any]:
        self.engine.abort_request(ids)
        return {}

    def do_status(self) -> dict[str, Any]:
        """Blocks in use (beside the null block), requests that the scheduler holds, stats so far, resident memory."""
        pool = self.scheduler.kv_cache_manager.block_pool
        cached = self.scheduler.cache_config.enable_prefix_caching
        in_use = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return {
            "blocks_in_use": in_use,
            "prefix_caching": bool(cached),
            "requests": len(self.scheduler.requests),
            "stats": self.stats,
            "num_blocks": pool.num_gpu_blocks,
            "rss_mib": psutil.Process().memory_info().rss / (1 << 20),
        }

    def do_faults(self, text: str) -> dict[str, Any]:
        """Follow another schedule of faults; the engine must have been started with one."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        from connector.transport.faulty import Faults

        get_kv_transfer_group()._working._transport.plan(Faults.parse(text))
        return {}

    def do_stray(self, ids: list[str]) -> list[str]:
        """Report completions that nobody awaits to the scheduler side; returns those that it passes on."""
        from vllm.v1.outputs import KVConnectorOutput

        output = KVConnectorOutput(finished_recving=set(ids), failed_recving=set(ids))
        self.scheduler.connector.update_connector_output(output)
        return sorted((output.finished_recving or set()) | (output.failed_recving or set()))

    def do_finish(self, tables: list[list[int]], computed: int, prompt: int) -> list[Any]:
        """Let the scheduler side see a prefilled request end with these block tables; returns what it answers vLLM."""
        from types import SimpleNamespace

        from vllm.v1.request import RequestStatus

        side = self.scheduler.connector._scheduling
        side._producing["finish"] = bytes(32)
        request = SimpleNamespace(
            request_id="finish",
            num_prompt_tokens=prompt,
            num_computed_tokens=computed,
            status=RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        return list(side.finished(request, tuple(tables)))

    def do_groups(self) -> list[dict[str, Any]]:
        """vLLM's own groups."""
        return [
            {
                "spec": type(group.kv_cache_spec).__name__,
                "block_size": group.kv_cache_spec.block_size,
                "layers": group.layer_names,
                "window": getattr(group.kv_cache_spec, "sliding_window", None),
                "chunk": getattr(group.kv_cache_spec, "attention_chunk_size", None),
                "page_bytes": group.kv_cache_spec.page_size_bytes,
                "data_bytes": group.kv_cache_spec.real_page_size_bytes,  # without padding
            }
            for group in self.scheduler.kv_cache_config.kv_cache_groups
        ]

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished:
                completion = output.outputs[0]
                logprobs = [
                    entry[token].logprob
                    for entry, token in zip(completion.logprobs or [], completion.token_ids, strict=False)
                ]
                self.finished[output.request_id] = {
                    "tokens": list(completion.token_ids),
                    "logprobs": logprobs,
                    "reason": completion.finish_reason,
                    "transfer": output.kv_transfer_params,
                    "cached": output.num_cached_tokens,
                }

    def _state(self, ids: list[str]) -> str:
        return ", ".join(
            f"{request.request_id}={request.status.name}"
            for request in self.scheduler.requests.values()
            if any(request.request_id.startswith(wanted) for wanted in ids)
        )


if __name__ == "__main__":
    main()

"""Real vLLM engines, one process each, for tests: the cheapest honest pair."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hma_cli.models.options import AUTO

STARTUP_SECONDS = 240


@dataclass
class Engine:
    """A child engine. `call` sends one command and waits for its answer."""

    process: subprocess.Popen[str]
    answers: int
    log: Path
    _buffer: str = ""

    def call(self, op: str, *, wait: float = 180.0, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **arguments}) + "\n")
        self.process.stdin.flush()
        answer = self.read(wait)
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(f"{op}: {answer['error']}\n{self.tail()}")
        return answer

    def read(self, wait: float) -> Any:
        deadline = time.monotonic() + wait
        while "\n" not in self._buffer:
            ready, _, _ = select.select([self.answers], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self.answers, 1 << 20).decode() if ready else ""
            if not chunk:
                state = "ended" if self.process.poll() is not None or ready else f"silent for {wait} s"
                raise AssertionError(f"the engine is {state}\n{self.tail()}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition("\n")
        return json.loads(line)

    def generate(self, requests: Sequence[dict[str, Any]], *, wait: float = 180.0) -> dict[str, Any]:
        """Queue requests and run them to their ends; results by id."""
        self.call("add", requests=list(requests))
        results: dict[str, Any] = self.call("run", ids=[r["id"] for r in requests], timeout=wait - 5, wait=wait)
        return results

    def status(self) -> dict[str, Any]:
        return dict(self.call("status"))

    def wait_free(self, seconds: float = 30.0) -> dict[str, Any]:
        """Wait until no request holds anything; returns the status."""
        deadline = time.monotonic() + seconds
        while (status := self.status())["requests"] or status["blocks_in_use"]:
            assert time.monotonic() < deadline, f"blocks are still held after {seconds} s: {status}"
            time.sleep(0.05)
        return status

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def ask_to_end(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()

    def stop(self) -> None:
        self.ask_to_end()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        with contextlib.suppress(OSError):
            os.close(self.answers)


def start_engine(name: str, args: dict[str, Any], *, core: int, log_dir: Path, env: dict[str, str]) -> Engine:
    """Start a child engine on one core, each of several ranks on one of its own; does not wait for it."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = args.get("tensor_parallel_size", 1)
    binding = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks)) if ranks > 1 else str(core)
    read_end, write_end = os.pipe()
    log = log_dir / f"{name}.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("engine_child.py")), str(write_end), json.dumps(args)],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            pass_fds=(write_end,),
            text=True,
            env={**os.environ, **engine_env(binding), **env},
        )
    os.close(write_end)
    return Engine(process, read_end, log)


def engine_env(binding: str) -> dict[str, str]:
    """Environment of a CPU engine without a server. binding: the core of each rank, as vLLM writes it."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": binding,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
    }


def engine_args(model: Path, connector: str | None, **changes: Any) -> dict[str, Any]:
    """Engine arguments of a test engine; `connector` is `hma`, `nixl` or None.

    In float32: where the processor has AMX, one engine's bfloat16 log-probabilities for one prompt differ by more than
    the tests allow (0.004) when the prompt is computed in other pieces.
    """
    args: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 1024,
        "block_size": 32,
        "distributed_executor_backend": "uni",
        "enable_prefix_caching": False,
        "seed": 0,
        "disable_hybrid_kv_cache_manager": False,
    }
    if connector is not None:
        names = {"hma": "HmaNixlConnector", "nixl": "NixlConnector"}
        args["kv_transfer_config"] = {
            "kv_connector": names[connector],
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"lease_seconds": 10.0} if connector == "hma" else {},
        }
    return {**args, **changes}


def state_dtype() -> str:
    """In what vLLM's CPU backend keeps states, for `RankOptions`: it decides by the processor."""
    import torch

    return "float32" if torch.cpu._is_avx512_bf16_supported() else AUTO


@contextlib.contextmanager
def engines(
    specs: dict[str, dict[str, Any]], log_dir: Path, env: dict[str, str] | None = None
) -> Iterator[dict[str, Engine]]:
    """Start engines side by side, wait until all are ready, stop them all at the end."""
    started: dict[str, Engine] = {}
    try:
        for index, (name, args) in enumerate(specs.items()):
            cores = sorted(os.sched_getaffinity(0))
            started[name] = start_engine(name, args, core=cores[index % len(cores)], log_dir=log_dir, env=env or {})
        for engine in started.values():
            assert engine.read(STARTUP_SECONDS) == {"ready": True}
        yield started
    finally:
        for engine in started.values():
            engine.ask_to_end()
        for engine in started.values():
            engine.stop()


def prefill(engine: Engine, prompts: dict[str, list[int]]) -> dict[str, Any]:
    """Send prompts to P as a router does; results by name, each with the handle under `transfer`."""
    return engine.generate(
        [
            {"id": name, "tokens": tokens, "params": {"max_tokens": 1}, "transfer": {"do_remote_decode": True}}
            for name, tokens in prompts.items()
        ]
    )


def hand_over(
    p: Engine, d: Engine, prompts: dict[str, list[int]], params: dict[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Send prompts through a pair as a router does: to P with max_tokens 1, then to D with P's parameters."""
    first = prefill(p, {f"p-{name}": tokens for name, tokens in prompts.items()})
    second = d.generate(
        [
            {"id": f"d-{name}", "tokens": tokens, "params": params or {}, "transfer": first[f"p-{name}"]["transfer"]}
            for name, tokens in prompts.items()
        ]
    )
    return first, {name: second[f"d-{name}"] for name in prompts}

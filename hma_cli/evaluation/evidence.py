"""What really moved while the pair answered: the counters of prefill and decode around the run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from connector.errors import PeerUnreachable
from hma_cli.cluster.metrics import Counters, difference, read_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

PATIENCE = 10.0  # seconds until the engines' last statistics have reached /metrics
_POLL = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Differences of counters over one run. planned is None for the in-tree connector, which has no plan to compare.

    transfers: prompts whose KV arrived completely. claims_granted: by prefill; None for the in-tree connector.
    """

    connector: str
    bytes_moved: int = 0
    bytes_planned: int | None = 0
    descriptors_planned: int | None = 0
    descriptors_posted: int = 0
    transfers: int = 0
    claims_granted: int | None = 0
    claims_refused: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    failed_transfers: int = 0
    retries: int = 0
    leases_expired: int = 0
    restarted: bool = False

    def settled(self, requests: int) -> bool:
        """Whether the counters account for this many requests, so that waiting longer shows nothing new."""
        if self.connector == "nixl":
            return self.transfers + self.failed_transfers >= requests
        granted = self.claims_granted or 0
        return self.transfers + sum(self.fallbacks.values()) >= requests and granted >= self.transfers


def evidence_of(connector: str, prefill: Counters, decode: Counters) -> Evidence:
    """Read the differences of both sides' counters. Pure."""
    restarted = any(
        value < 0 for side in (prefill, decode) for (name, _), value in side.samples.items() if _counts(name)
    )
    if connector == "nixl":
        return Evidence(
            connector=connector,
            bytes_moved=int(decode.total("vllm:nixl_bytes_transferred_sum")),
            bytes_planned=None,
            descriptors_planned=None,
            descriptors_posted=int(decode.total("vllm:nixl_num_descriptors_sum")),
            transfers=int(decode.total("vllm:nixl_bytes_transferred_count")),
            claims_granted=None,
            failed_transfers=int(
                decode.total("vllm:nixl_num_failed_transfers_total")
                + decode.total("vllm:nixl_num_failed_notifications_total")
            ),
            leases_expired=int(prefill.total("vllm:nixl_num_kv_expired_reqs_total")),
            restarted=restarted,
        )
    both = (prefill, decode)
    return Evidence(
        connector=connector,
        bytes_moved=int(decode.total("vllm:hma_bytes_moved_total")),
        bytes_planned=int(decode.total("vllm:hma_bytes_planned_total")),
        descriptors_planned=int(decode.total("vllm:hma_descriptors_planned_total")),
        descriptors_posted=int(decode.total("vllm:hma_descriptors_posted_total")),
        transfers=int(decode.total("vllm:hma_transfers_total")),
        claims_granted=int(prefill.total("vllm:hma_claims_granted_total")),
        claims_refused=_by_reason(prefill, "vllm:hma_claims_refused_total"),
        fallbacks=_by_reason(decode, "vllm:hma_fallbacks_total"),
        retries=int(decode.total("vllm:hma_retries_total")),
        leases_expired=int(sum(side.total("vllm:hma_leases_expired_total") for side in both)),
        restarted=restarted,
    )


class Watch:
    """The counters of a pair since `start`. urls: base URLs of the prefill and of the decode servers."""

    def __init__(self, *, connector: str, prefill: Sequence[str], decode: Sequence[str]) -> None:
        self._connector = connector
        self._urls = (tuple(prefill), tuple(decode))
        self._before = self._read()

    def evidence(self, *, requests: int) -> Evidence:
        """Differences since the start, waiting until they account for `requests` or the patience ends."""
        deadline = time.monotonic() + PATIENCE
        while True:
            now = self._read()
            prefill, decode = (difference(old, new) for old, new in zip(self._before, now, strict=True))
            found = evidence_of(self._connector, prefill, decode)
            if found.settled(requests) or time.monotonic() > deadline:
                return found
            time.sleep(_POLL)

    def _read(self) -> tuple[Counters, Counters]:
        prefill, decode = (read_metrics("\n".join(metrics_text(url) for url in urls)) for urls in self._urls)
        return prefill, decode


def metrics_text(url: str) -> str:
    """A server's /metrics. PeerUnreachable where it does not answer."""
    import httpx

    try:
        return httpx.get(f"{url}/metrics", timeout=30.0, trust_env=False).raise_for_status().text
    except httpx.HTTPError as error:
        raise PeerUnreachable(
            f"{url}/metrics does not answer: {str(error) or type(error).__name__}.",
            remedy="What moved is read from the metrics of prefill and decode: give their base URLs and keep them up.",
        ) from error


def _by_reason(counters: Counters, name: str) -> dict[str, int]:
    return {reason: int(value) for reason, value in sorted(counters.by_label(name, "reason").items())}


def _counts(name: str) -> bool:
    return name.startswith(("vllm:hma_", "vllm:nixl_")) and name.endswith(("_total", "_count", "_sum"))

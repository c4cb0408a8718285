"""Counters of both sides, through vLLM's connector stats to its log line and its `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from connector.transport.loader import Outcome

COUNTERS = {
    "transfers": "Prompts whose KV was read completely.",
    "bytes_planned": "Bytes that the plans of ended loads move.",
    "bytes_moved": "Bytes that the transport reports as read, by its own telemetry.",
    "descriptors_planned": "Pages in the plans of ended loads.",
    "runs_planned": "Descriptors that the plans of ended loads foresee, after merging neighbours.",
    "descriptors_posted": "Descriptors that the transport posted, after merging neighbours.",
    "retries": "Parts of a transfer that were posted again.",
    "rows_again": "Rows of failed parts that were posted again.",
    "bytes_again": "Bytes that were read again because a page's digest was wrong.",
    "claims_granted": "Claims that this engine granted.",
    "leases_expired": "Offers and claims whose lease ended on this engine.",
}
OUTCOMES = (
    "bytes_planned",
    "bytes_moved",
    "bytes_again",
    "descriptors_planned",
    "runs_planned",
    "descriptors_posted",
    "retries",
    "rows_again",
)
LABELLED = {
    "claims_refused": ("Claims that this engine refused.", ("reason",)),
    "part_failures": ("Posts of one part of a transfer that failed, by kind.", ("kind",)),
    "faults_injected": ("Faults that the `faults` setting injected, by name.", ("fault",)),
    "fallbacks": ("Requests with a handle whose KV was not used, by reason and outcome.", ("reason", "outcome")),
}
HISTOGRAMS = {
    "transfer_seconds": "Seconds from post to end of a load's longest part, by the transport's telemetry.",
    "post_seconds": "Seconds inside the transport's post calls of one load.",
}
GAUGE = "requests_remote_wait"
BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass
class HmaStats(KVConnectorStats):
    """Deltas since the last step. data: counters by name, `labelled` name to "a|b" to count, lists of seconds."""

    data: dict[str, Any] = field(default_factory=dict)

    def count(self, name: str, amount: int = 1) -> None:
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def count_labelled(self, name: str, *labels: str, amount: int = 1) -> None:
        table = self.data.setdefault(name, {})
        key = "|".join(labels)
        table[key] = table.get(key, 0) + amount

    def observe(self, name: str, seconds: float) -> None:
        self.data.setdefault(name, []).append(seconds)

    def record(self, outcome: Outcome) -> None:
        """Count what one rank moved for an ended load. Whether the request's prompt has been read, by all ranks, is
        counted by the scheduler side."""
        for name in OUTCOMES:
            self.count(name, getattr(outcome, name))
        for kind, amount in outcome.failures.items():
            self.count_labelled("part_failures", kind, amount=amount)
        if outcome.ok:
            self.observe("transfer_seconds", outcome.transfer_seconds)
            self.observe("post_seconds", outcome.post_seconds)

    def reset(self) -> None:
        self.data = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            if isinstance(value, list):
                self.data.setdefault(name, []).extend(value)
            elif isinstance(value, dict):
                table = self.data.setdefault(name, {})
                for key, amount in value.items():
                    table[key] = table.get(key, 0) + amount
            elif name == GAUGE:
                self.data[name] = value
            else:
                self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line's worth: the counters, and the mean of each series in milliseconds."""
        line: dict[str, int | float] = {}
        for name, value in self.data.items():
            if isinstance(value, list):
                line[name.replace("_seconds", "_ms_mean")] = round(1000 * sum(value) / len(value), 3)
            elif isinstance(value, dict):
                line |= {f"{name}[{key.replace('|', ',')}]": amount for key, amount in value.items()}
            else:
                line[name] = value
        return line


class HmaPromMetrics(KVConnectorPromMetrics):
    """The stats as Prometheus metrics `vllm:hma_*`, for each engine of the server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine)
        self._counters = {name: self._make(self._counter_cls, name, text) for name, text in COUNTERS.items()}
        self._labelled = {
            name: (self._make(self._counter_cls, name, text, labels), labels)
            for name, (text, labels) in LABELLED.items()
        }
        self._histograms = {
            name: self._make(self._histogram_cls, name, text, buckets=BUCKETS) for name, text in HISTOGRAMS.items()
        }
        self._gauge = self._make(
            self._gauge_cls, GAUGE, "Requests that wait for a claim or a load.", multiprocess_mode="sum"
        )
        for engine_labels in per_engine.values():
            for metric in (*self._counters.values(), *self._histograms.values(), self._gauge):
                metric.labels(*engine_labels)  # a series that exists reads 0 instead of being absent

    def _make(self, make: Any, name: str, text: str, labels: tuple[str, ...] = (), **options: Any) -> Any:
        return make(name=f"vllm:hma_{name}", documentation=text, labelnames=[*self._labelnames, *labels], **options)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in self._counters:
                self._counters[name].labels(*engine).inc(value)
            elif name in self._labelled:
                metric, labels = self._labelled[name]
                for key, amount in value.items():
                    metric.labels(*engine, *key.split("|", len(labels) - 1)).inc(amount)
            elif name in self._histograms:
                for seconds in value:
                    self._histograms[name].labels(*engine).observe(seconds)
            elif name == GAUGE:
                self._gauge.labels(*engine).set(value)

"""Settings that are refused by name, the version gate, and stats that add up."""

from __future__ import annotations

from typing import Any

import pytest

from connector.engine.gate import HOOKS, check_interface
from connector.engine.metrics import HmaStats
from connector.engine.settings import Settings, settings_from
from connector.errors import ConfigError, StackError
from connector.transport.loader import Outcome


def test_settings_are_typed_and_an_unknown_key_names_the_nearest() -> None:
    assert settings_from({}) == Settings()
    assert settings_from({"lease_seconds": 5, "allowed_peers": ["10.0.0.0/8"]}).allowed_peers == ("10.0.0.0/8",)
    with pytest.raises(ConfigError, match="lease_second") as caught:
        settings_from({"lease_second": 5})
    assert "lease_seconds" in caught.value.remedy
    with pytest.raises(ConfigError, match="Unknown connector setting 'zzz'"):
        settings_from({"zzz": 1})
    for wrong in ({"control_port": 70000}, {"lease_seconds": 0}, {"max_attempts": "many"}, {"backends": []}):
        with pytest.raises(ConfigError, match="A connector setting is wrong"):
            settings_from(wrong)


def base() -> type:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return KVConnectorBase_V1


def test_the_tested_interface_passes_and_every_hook_exists() -> None:
    check_interface(base(), "0.32.0")
    assert all(hasattr(base(), name) for name in HOOKS)


def test_a_changed_hook_is_named() -> None:
    class Changed(base()):  # type: ignore[misc]
        def on_new_request(self, request: Any, more: Any) -> None: ...

        start_load_kv = None

    with pytest.raises(StackError, match=r"changed: start_load_kv, on_new_request") as caught:
        check_interface(Changed, "0.32.9")
    assert "Install vLLM 0.32" in caught.value.remedy


def test_an_untested_version_is_refused_unless_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StackError, match=r"0\.33\.0 has not been tested"):
        check_interface(base(), "0.33.0")
    monkeypatch.setenv("HMA_ALLOW_UNTESTED_VLLM", "1")
    check_interface(base(), "0.33.0")


def outcome(reason: str = "", **counts: Any) -> Outcome:
    return Outcome(request_id="r", reason=reason, bytes_planned=10, bytes_moved=0 if reason else 10, **counts)


def test_stats_count_what_ended_and_why() -> None:
    stats = HmaStats()
    stats.record(outcome(descriptors_planned=4, descriptors_posted=2, transfer_seconds=0.2, post_seconds=0.1))
    stats.record(outcome("lease"))
    stats.record(outcome("cancelled"))
    assert stats.data == {
        "bytes_planned": 30,
        "bytes_moved": 10,
        "descriptors_planned": 4,
        "descriptors_posted": 2,
        "transfer_seconds": [0.2],
        "post_seconds": [0.1],
    }


def test_stats_add_up_and_the_gauge_is_the_last_value() -> None:
    one = HmaStats({"transfers": 1, "post_seconds": [0.1], "claims_refused": {"digest": 1}, "requests_remote_wait": 4})
    two = HmaStats({"transfers": 2, "post_seconds": [0.3], "claims_refused": {"digest": 2, "unknown": 1}})
    two.data["requests_remote_wait"] = 1
    total = one.aggregate(two)
    assert total.data == {
        "transfers": 3,
        "post_seconds": [0.1, 0.3],
        "claims_refused": {"digest": 3, "unknown": 1},
        "requests_remote_wait": 1,
    }
    assert total.reduce()["post_ms_mean"] == 200.0
    assert total.reduce()["claims_refused[digest]"] == 3
    assert HmaStats().is_empty()

"""What a log says about a failed start."""

from __future__ import annotations

import pytest

from hma_cli.cluster.diagnosis import diagnose, hma_off_cause

CORE = "(EngineCore pid=4468) ERROR 12-01 05:37:24 [core.py:72] "
CONNECTOR_WARNING = (
    "WARNING 12-01 05:37:24 [vllm.py:1] Turning off hybrid kv cache manager because `--kv-transfer-config` selects a "
    "KV connector that does not support it. Impact: ..."
)


@pytest.mark.parametrize(
    ("lines", "cause", "remedy"),
    [
        (
            (CORE + "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:20779')",),
            "A port was taken while the server started: Address already in use (addr='tcp://127.0.0.1:20779').",
            "Launch again",
        ),
        (
            (
                "ValueError: To serve at least one request with the models's max seq len (2048), (0.12 GiB KV cache is "
                "needed, which is larger than the available KV cache memory (0.01 GiB).",
            ),
            "The KV space is too small for one request: To serve at least one request with the models's max seq len",
            "--kv-space",
        ),
        (("ValueError: Unsupported connector type: HmaNixlConnector",), "HmaNixlConnector", "VLLM_PLUGINS"),
        (("api_server.py: error: unrecognized arguments: --nope",), "unrecognized arguments: --nope", "--"),
        (
            (
                CORE + "ValueError: first thing",
                CORE + "RuntimeError: Engine core initialization failed. See root cause",
            ),
            "first thing.",
            "",
        ),
    ],
)
def test_known_failures(lines: tuple[str, ...], cause: str, remedy: str) -> None:
    found = diagnose(lines)
    assert found is not None
    assert cause in found.cause
    assert remedy in found.remedy
    assert not found.hma_off


def test_hma_refused_names_its_cause() -> None:
    refused = "ValueError: Hybrid KV cache manager was explicitly enabled but is not supported in this configuration."
    found = diagnose((CONNECTOR_WARNING, refused))
    assert found is not None
    assert found.hma_off
    assert found.cause == "vLLM cannot turn HMA on in this configuration: the KV connector does not support it."
    assert "--no-require-hma" in found.remedy


def test_a_log_without_errors_has_no_diagnosis() -> None:
    assert diagnose(("INFO: fine", "Loading weights took 0.01 seconds")) is None
    assert diagnose(()) is None


def test_the_cause_of_hma_being_off() -> None:
    assert hma_off_cause((CONNECTOR_WARNING,)) == "the KV connector does not support it"
    assert hma_off_cause(("nothing",)) == ""

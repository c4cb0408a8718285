"""vLLM's plugin hook: makes `HmaNixlConnector` known by name in every vLLM process."""

from __future__ import annotations

NAME = "HmaNixlConnector"
MODULE = "connector.engine.facade"


def register() -> None:
    """Register the connector. vLLM may call this more than once in a process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except ValueError:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ImportError:
        # Registered, but its module cannot be imported here: vLLM says so when the connector is asked for.
        return

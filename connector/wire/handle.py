"""The handle: `kv_transfer_params` as routers carry them from P's reply to D's request.

Everything in it comes from an HTTP body. It says whom to ask and for what; it never says what to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from connector.errors import ProtocolError
from connector.wire.messages import MAX_ID


@dataclass(frozen=True, slots=True, kw_only=True)
class Handle:
    """Where an offer is, and which it is. host and port: P's control channel."""

    engine_id: str
    epoch: str
    request_id: str
    host: str
    port: int

    def to_params(self, *, num_tokens: int, tp_size: int) -> dict[str, Any]:
        """The parameters of P's reply, under the keys that existing routers pass through.

        The epoch rides in `remote_engine_id`, because routers may drop keys that they do not know.
        `remote_block_ids` is there for routers that look for it, and empty: block ids travel over the control channel.
        """
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": f"{self.engine_id}@{self.epoch}",
            "remote_request_id": self.request_id,
            "remote_host": self.host,
            "remote_port": self.port,
            "remote_block_ids": [],
            "remote_num_tokens": num_tokens,
            "tp_size": tp_size,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> Handle:
        """Validate parameters of a request. ProtocolError names the key that is missing or wrong."""
        engine, at, epoch = _text(params, "remote_engine_id").rpartition("@")
        if not at or not engine or not epoch:
            raise ProtocolError("remote_engine_id does not come from this connector.")
        port = params.get("remote_port")
        if not isinstance(port, int) or isinstance(port, bool) or not 0 < port < 65536:
            raise ProtocolError(f"remote_port is not a port: {str(port)[:40]!r}.")
        host = _text(params, "remote_host")
        if len(host) > 255:
            raise ProtocolError("remote_host is too long.")
        return cls(engine_id=engine, epoch=epoch, request_id=_text(params, "remote_request_id"), host=host, port=port)


def _text(params: Mapping[str, Any], key: str) -> str:
    value = params.get(key)
    if not isinstance(value, str) or not value or len(value) > MAX_ID:
        raise ProtocolError(f"{key} is missing or not a text of at most {MAX_ID} characters.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ProtocolError(f"{key} is not valid Unicode.") from error
    return value

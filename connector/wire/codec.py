"""Frames of the control channel: one frame, one message, authenticated when a key is set.

    magic "HMA" | protocol (1 byte) | mac length (1 byte) | mac | nonce (16 bytes) | msgpack body

The nonce ties a reply to its request. With a key the mac is HMAC-SHA256 over direction, protocol, nonce and body, so a
reply cannot pass as a request and a reply to one request cannot answer another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import msgspec

from connector.errors import ConfigError, ProtocolError
from connector.wire.messages import PROTOCOL, Reply, Request, encoder, reply_decoder, request_decoder

MAGIC = b"HMA"
NONCE_BYTES = 16
MAC_BYTES = 32
MAX_FRAME = 8 << 20
MIN_KEY_BYTES = 16
_HEADER = len(MAGIC) + 2

Direction = Literal[b"request", b"reply"]


class Unauthorised(ProtocolError):
    """The frame carries no mac or a wrong one."""

    code = "unauthorised"


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes and decodes frames; `key` is empty for a channel without authentication."""

    key: bytes = field(default=b"", repr=False)

    def request(self, message: Request) -> tuple[bytes, bytes]:
        """The frame of a new request, and the nonce that its reply will carry."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        return self._frame(b"request", nonce, encoder.encode(message)), nonce

    def reply(self, message: Reply, nonce: bytes) -> bytes:
        """The frame that answers the request with this nonce."""
        return self._frame(b"reply", nonce, encoder.encode(message))

    def read_request(self, frame: bytes) -> tuple[Request, bytes]:
        """Decode a request and its nonce. ProtocolError or Unauthorised for anything else."""
        nonce, body = self._open(b"request", frame)
        return cast(Request, _decode(request_decoder, body)), nonce

    def read_reply(self, frame: bytes) -> tuple[Reply, bytes]:
        """Decode a reply and the nonce of the request it answers."""
        nonce, body = self._open(b"reply", frame)
        return cast(Reply, _decode(reply_decoder, body)), nonce

    def nonce_of(self, frame: bytes) -> bytes:
        """The nonce of a frame that may not decode, for an answer that says so; zeros when there is none."""
        start = _HEADER + (frame[_HEADER - 1] if len(frame) >= _HEADER else 0)
        nonce = frame[start : start + NONCE_BYTES]
        return nonce if len(nonce) == NONCE_BYTES else bytes(NONCE_BYTES)

    def _frame(self, direction: Direction, nonce: bytes, body: bytes) -> bytes:
        mac = self._mac(direction, nonce, body)
        return b"".join((MAGIC, bytes((PROTOCOL, len(mac))), mac, nonce, body))

    def _mac(self, direction: Direction, nonce: bytes, body: bytes) -> bytes:
        if not self.key:
            return b""
        return hmac.digest(self.key, direction + bytes((PROTOCOL,)) + nonce + body, hashlib.sha256)

    def _open(self, direction: Direction, frame: bytes) -> tuple[bytes, bytes]:
        if len(frame) > MAX_FRAME:
            raise ProtocolError(f"A frame of {len(frame)} bytes is over the limit of {MAX_FRAME}.")
        if len(frame) < _HEADER + NONCE_BYTES or frame[: len(MAGIC)] != MAGIC:
            raise ProtocolError("Not a frame of this protocol.")
        protocol, mac_length = frame[len(MAGIC)], frame[len(MAGIC) + 1]
        if protocol != PROTOCOL:
            raise ProtocolError("Another protocol version.", ours=PROTOCOL, theirs=protocol)
        mac, rest = frame[_HEADER : _HEADER + mac_length], frame[_HEADER + mac_length :]
        nonce, body = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
        if not hmac.compare_digest(mac, self._mac(direction, nonce, body)):
            raise Unauthorised("unauthorised", remedy="Give both engines the same HMA_KEY or key file.")
        if len(nonce) != NONCE_BYTES:
            raise ProtocolError("A frame is cut short.")
        return nonce, body


def _decode(decoder: msgspec.msgpack.Decoder[Request] | msgspec.msgpack.Decoder[Reply], body: bytes) -> object:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"Not a valid message: {error}.") from error


def key_from_environment(environ: Mapping[str, str] | None = None) -> bytes:
    """The shared key: `HMA_KEY`, or the content of the file that `HMA_KEY_FILE` names, or empty for none."""
    env = os.environ if environ is None else environ
    if text := env.get("HMA_KEY"):
        key = text.encode()
    elif path := env.get("HMA_KEY_FILE"):
        try:
            key = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"Cannot read the key file: {error.strerror}.", remedy="Check HMA_KEY_FILE.") from error
    else:
        return b""
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"The shared key has {len(key)} bytes, at least {MIN_KEY_BYTES} are needed.",
            remedy="Make one with: openssl rand -hex 32",
        )
    return key

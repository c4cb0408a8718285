"""Frames of the control channel: one frame, one message, authenticated when a key is set.

    magic "HMA" | protocol (1 byte) | mac length (1 byte) | mac | nonce (16 bytes) | msgpack body

The nonce ties a reply to its request, and names each request once: 8 random bytes for a life of the client, and a
counter. With a key the mac is HMAC-SHA256 over direction, protocol, salt, nonce and body. A reply cannot pass as a
request, a reply to one request cannot answer another, and what was sent to one life of a server is worth nothing to the
next: a request's salt is the server's own, drawn at its start. It is no secret: whoever asks without it is told so, in
the one reply that carries no mac.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import msgspec

from connector.errors import ConfigError, ProtocolError
from connector.wire.guards import SENDER_BYTES
from connector.wire.messages import PROTOCOL, Refused, Reply, Request, encoder, reply_decoder, request_decoder

MAGIC = b"HMA"
NONCE_BYTES = 16
MAC_BYTES = 32
MAX_FRAME = 8 << 20
MIN_KEY_BYTES = 16
MAX_KEYS = 2
_HEADER = len(MAGIC) + 2

Direction = Literal[b"request", b"reply"]


class Unauthorised(ProtocolError):
    """The frame carries no mac or a wrong one."""

    code = "unauthorised"


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes and decodes frames. keys: the first one seals, all of them are accepted; none for a channel without
    authentication. sender: names this life of the client in its nonces.
    """

    keys: tuple[bytes, ...] = field(default=(), repr=False)
    sender: bytes = field(default_factory=lambda: secrets.token_bytes(SENDER_BYTES), repr=False)
    _numbers: Iterator[int] = field(default_factory=itertools.count, repr=False, compare=False)

    def request(self, message: Request, salt: bytes = b"") -> tuple[bytes, bytes]:
        """The frame of a new request, and the nonce that its reply will carry. salt: the server's, as far as known."""
        nonce = self.sender + next(self._numbers).to_bytes(NONCE_BYTES - SENDER_BYTES, "big")
        key = self.keys[0] if self.keys else b""
        return _frame(b"request", key, salt, nonce, encoder.encode(message)), nonce

    def reply(self, message: Reply, nonce: bytes, key: bytes | None = None) -> bytes:
        """The frame that answers the request with this nonce, sealed with the key that the request had."""
        if key is None:
            key = self.keys[0] if self.keys else b""
        return _frame(b"reply", key, b"", nonce, encoder.encode(message))

    def read_request(self, frame: bytes, salt: bytes = b"") -> tuple[Request, bytes, bytes]:
        """Decode a request: with its nonce and the key it was sealed with. ProtocolError or Unauthorised else."""
        nonce, body, key = self._open(b"request", salt, frame)
        return cast(Request, _decode(request_decoder, body)), nonce, key

    def read_reply(self, frame: bytes) -> tuple[Reply, bytes]:
        """Decode a reply and the nonce of the request it answers."""
        nonce, body, _ = self._open(b"reply", b"", frame)
        return cast(Reply, _decode(reply_decoder, body)), nonce

    def turned_away(self, salt: bytes, nonce: bytes) -> bytes:
        """The reply, without a mac, to a request that carries none or a wrong one."""
        return _frame(b"reply", b"", b"", nonce, encoder.encode(Refused(reason="unauthorised", salt=salt)))

    def read_salt(self, frame: bytes) -> tuple[bytes, bytes]:
        """The salt and the nonce of a `turned_away` reply. ProtocolError for any other frame without a mac."""
        reply, nonce = Codec().read_reply(frame)
        if not isinstance(reply, Refused) or reply.reason != "unauthorised" or not reply.salt:
            raise ProtocolError("A reply without a mac.")
        return reply.salt, nonce

    def nonce_of(self, frame: bytes) -> bytes:
        """The nonce of a frame that may not decode, for an answer that says so; zeros when there is none."""
        start = _HEADER + (frame[_HEADER - 1] if len(frame) >= _HEADER else 0)
        nonce = frame[start : start + NONCE_BYTES]
        return nonce if len(nonce) == NONCE_BYTES else bytes(NONCE_BYTES)

    def _open(self, direction: Direction, salt: bytes, frame: bytes) -> tuple[bytes, bytes, bytes]:
        if len(frame) > MAX_FRAME:
            raise ProtocolError(f"A frame of {len(frame)} bytes is over the limit of {MAX_FRAME}.")
        if len(frame) < _HEADER + NONCE_BYTES or frame[: len(MAGIC)] != MAGIC:
            raise ProtocolError("Not a frame of this protocol.")
        protocol, mac_length = frame[len(MAGIC)], frame[len(MAGIC) + 1]
        if protocol != PROTOCOL:
            raise ProtocolError("Another protocol version.", ours=PROTOCOL, theirs=protocol)
        mac, rest = frame[_HEADER : _HEADER + mac_length], frame[_HEADER + mac_length :]
        nonce, body = rest[:NONCE_BYTES], rest[NONCE_BYTES:]
        # Every key is tried, whichever fits: how long this takes says nothing.
        fitting = [
            key for key in self.keys or (b"",) if hmac.compare_digest(mac, _mac(direction, key, salt, nonce, body))
        ]
        if not fitting:
            raise Unauthorised("unauthorised", remedy="Give both engines the same HMA_KEY or key file.")
        if len(nonce) != NONCE_BYTES:
            raise ProtocolError("A frame is cut short.")
        return nonce, body, fitting[0]


def _frame(direction: Direction, key: bytes, salt: bytes, nonce: bytes, body: bytes) -> bytes:
    mac = _mac(direction, key, salt, nonce, body)
    return b"".join((MAGIC, bytes((PROTOCOL, len(mac))), mac, nonce, body))


def _mac(direction: Direction, key: bytes, salt: bytes, nonce: bytes, body: bytes) -> bytes:
    if not key:
        return b""
    return hmac.digest(key, direction + bytes((PROTOCOL, len(salt))) + salt + nonce + body, hashlib.sha256)


def _decode(decoder: msgspec.msgpack.Decoder[Request] | msgspec.msgpack.Decoder[Reply], body: bytes) -> object:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"Not a valid message: {error}.") from error


def keys_from_environment(environ: Mapping[str, str] | None = None) -> tuple[bytes, ...]:
    """The shared keys: `HMA_KEY`, separated by commas, or the lines of the file that `HMA_KEY_FILE` names, or none.

    To change a key without a gap: give all engines the new one behind the old one, then before it, then alone.
    """
    env = os.environ if environ is None else environ
    if text := env.get("HMA_KEY"):
        parts = text.encode().split(b",")
    elif path := env.get("HMA_KEY_FILE"):
        try:
            parts = Path(path).read_bytes().splitlines()
        except OSError as error:
            raise ConfigError(f"Cannot read the key file: {error.strerror}.", remedy="Check HMA_KEY_FILE.") from error
    else:
        return ()
    keys = tuple(key for key in (part.strip() for part in parts) if key)
    if not 1 <= len(keys) <= MAX_KEYS:
        raise ConfigError(f"There are {len(keys)} shared keys.", remedy=f"Give one, or {MAX_KEYS} while it is changed.")
    for key in keys:
        if len(key) < MIN_KEY_BYTES:
            raise ConfigError(
                f"The shared key has {len(key)} bytes, at least {MIN_KEY_BYTES} are needed.",
                remedy="Make one with: openssl rand -hex 32",
            )
    return keys

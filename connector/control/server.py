"""The server thread of the control channel: frames in, frames out, whatever the bytes."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable

import zmq

from connector.control.clock import Clock, lease_clock
from connector.control.peers import AllowedPeers
from connector.errors import ProtocolError, ResourceError
from connector.wire.codec import MAX_FRAME, Codec, Unauthorised
from connector.wire.guards import Limits, ReplayGuard, Throttle
from connector.wire.messages import Refused, Reply, Request
from connector.wire.offers import Refusal

logger = logging.getLogger("vllm.hma.control")

SALT_BYTES = 16
Handler = Callable[[Request], Reply]


class ControlServer:
    """Answers every request on a thread of its own, whether or not the engine is stepping.

    A frame passes, in this order: the sender's address, its limits, the seal, and that it has not been seen before.
    handler: called on the server thread; must not block. on_refused: told the reason of each frame that was refused
    before it reached the handler. allowed: addresses that are answered; None answers all.
    """

    def __init__(
        self,
        host: str,
        port: int,
        codec: Codec,
        handler: Handler,
        on_refused: Callable[[str], None] | None = None,
        *,
        allowed: AllowedPeers | None = None,
        limits: Limits | None = None,
        clock: Clock = lease_clock,
    ) -> None:
        self._codec, self._handler, self._on_refused = codec, handler, on_refused
        self._allowed, self._clock = allowed, clock
        self._salt = secrets.token_bytes(SALT_BYTES) if codec.keys else b""
        self._throttle, self._replays = Throttle(limits, clock()), ReplayGuard()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + 64)
        self._socket.setsockopt(zmq.RCVHWM, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5_000)  # ms: who only connects is dropped again
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 10_000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 30_000)
        try:
            self._socket.bind(f"tcp://{_bracketed(host)}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ResourceError(
                f"Cannot listen on {host}:{port}: {error}.", remedy="Set control_host and control_port."
            ) from error
        self.port: int = int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._stop, self._stopped = self._wake_pair()
        self._thread = threading.Thread(target=self._run, name="hma-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and free the port. May be called twice."""
        if self._thread.is_alive():
            self._stop.send(b"")
            self._thread.join(timeout=5)
        self._stop.close(linger=0)
        self._context.destroy(linger=0)

    def _wake_pair(self) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        near, far = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        far.bind("inproc://stop")
        near.connect("inproc://stop")
        return near, far

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stopped in ready:
                break
            try:
                identity, *rest = self._socket.recv_multipart(copy=False)
                answer = self._answer(identity.bytes, rest)
                if answer:
                    self._socket.send_multipart([identity.bytes, answer], flags=zmq.NOBLOCK)
            except zmq.ZMQError as error:
                logger.debug("control channel: %s", error)
            except Exception:
                logger.exception("control channel: a request failed")
        self._stopped.close(linger=0)
        self._socket.close(linger=0)

    def _answer(self, connection: bytes, frames: list[zmq.Frame]) -> bytes:
        """The answer's frame, empty where there is none."""
        if len(frames) != 1:
            return self._refuse(Refusal.MALFORMED)
        if not self._throttle.passes(connection, self._clock()):
            return self._refuse(Refusal.THROTTLED)
        frame = frames[0].bytes
        if self._allowed is not None and not self._allowed.permits(source := _source(frames[0])):
            detail = f"Address {source} is not among this engine's allowed_peers."
            return self._refuse(Refusal.NOT_ALLOWED, frame, detail)
        try:
            request, nonce, key = self._codec.read_request(frame, self._salt)
        except Unauthorised:
            self._refuse(Refusal.UNAUTHORISED)
            return self._codec.turned_away(self._salt, self._codec.nonce_of(frame))
        except ProtocolError as error:
            return self._refuse(Refusal.MALFORMED, frame, error.message[:200])
        if not self._replays.passes(nonce):
            return self._refuse(Refusal.REPLAYED, frame)
        self._throttle.know(connection, self._clock())
        return self._codec.reply(self._handler(request), nonce, key)

    def _refuse(self, reason: Refusal, frame: bytes = b"", detail: str = "") -> bytes:
        """Count a frame that is not handled; a reply to it, where there is a frame to reply to."""
        if self._on_refused is not None:
            self._on_refused(reason)
        if not frame:
            return b""
        return self._codec.reply(Refused(reason=reason, detail=detail), self._codec.nonce_of(frame))


def _source(frame: zmq.Frame) -> str:
    """The address that a frame came from, as the transport knows it."""
    try:
        return str(frame.get("Peer-Address"))
    except (zmq.ZMQError, KeyError, ValueError):
        return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

"""The server thread of the control channel: frames in, frames out, whatever the bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import zmq

from connector.errors import ProtocolError, ResourceError
from connector.wire.codec import MAX_FRAME, Codec, Unauthorised
from connector.wire.messages import Refused, Reply, Request
from connector.wire.offers import Refusal

logger = logging.getLogger("vllm.hma.control")

Handler = Callable[[Request], Reply]


class ControlServer:
    """Answers every request on a thread of its own, whether or not the engine is stepping.

    handler: called on the server thread; must not block. on_refused: told the reason of each frame that was refused
    before it reached the handler.
    """

    def __init__(
        self, host: str, port: int, codec: Codec, handler: Handler, on_refused: Callable[[str], None] | None = None
    ) -> None:
        self._codec, self._handler, self._on_refused = codec, handler, on_refused
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + 64)
        self._socket.setsockopt(zmq.RCVHWM, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 1000)
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
                identity, *rest = self._socket.recv_multipart()
                if len(rest) == 1:
                    self._socket.send_multipart([identity, self._answer(rest[0])], flags=zmq.NOBLOCK)
                else:
                    self._refuse(Refusal.MALFORMED)
            except zmq.ZMQError as error:
                logger.debug("control channel: %s", error)
            except Exception:
                logger.exception("control channel: a request failed")
        self._stopped.close(linger=0)
        self._socket.close(linger=0)

    def _answer(self, frame: bytes) -> bytes:
        try:
            request, nonce = self._codec.read_request(frame)
        except Unauthorised:
            self._refuse(Refusal.UNAUTHORISED)
            return self._codec.reply(Refused(reason=Refusal.UNAUTHORISED), self._codec.nonce_of(frame))
        except ProtocolError as error:
            self._refuse(Refusal.MALFORMED)
            detail = error.message[:200]
            return self._codec.reply(Refused(reason=Refusal.MALFORMED, detail=detail), self._codec.nonce_of(frame))
        return self._codec.reply(self._handler(request), nonce)

    def _refuse(self, reason: Refusal) -> None:
        if self._on_refused is not None:
            self._on_refused(reason)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host

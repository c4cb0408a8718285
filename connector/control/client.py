"""The client thread of the control channel, and one-shot questions for commands.

A `ControlClient` owns one socket per peer and keeps every question's deadline. Callbacks run on its thread, once per
question: with the reply, or with the error that stands for it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from connector.control.clock import Clock, lease_clock
from connector.errors import HmaError, PeerSilent, PeerUnreachable, ProtocolError
from connector.wire.codec import MAX_FRAME, Codec, Unauthorised, keys_from_environment
from connector.wire.messages import Describe, Described, EngineDescription, Refused, Reply, Request

logger = logging.getLogger("vllm.hma.control")

Endpoint = tuple[str, int]
OnReply = Callable[[Reply | HmaError, float], None]
T = TypeVar("T")
LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED  # a connection broke, or none could be made
MAX_RESEALED = 2  # times that a question is sealed anew: a server may restart in between, not for ever


@dataclass(frozen=True, slots=True)
class _Question:
    endpoint: Endpoint
    message: Request
    timeout: float
    on_reply: OnReply
    resealed: int = 0


@dataclass(frozen=True, slots=True)
class _Pending:
    """salt: the server's, that the question was sealed with."""

    question: _Question
    sent_at: float
    deadline: float
    salt: bytes


@dataclass(frozen=True, slots=True)
class _Link:
    """A socket to one peer. monitor: tells when its connection is lost."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self, linger: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close(linger=linger)


class ControlClient:
    """Asks peers from a thread of its own. A peer whose connection breaks, or that refuses one, is known to be
    unreachable at once: its questions do not wait for their deadlines.

    on_tick: called on the thread; does periodic work and returns the time of the next call, or None for "when woken".
    """

    def __init__(self, codec: Codec, on_tick: Callable[[float], float | None], clock: Clock = lease_clock) -> None:
        self._codec, self._on_tick, self._clock = codec, on_tick, clock
        self._commands: queue.SimpleQueue[_Question | Endpoint | None] = queue.SimpleQueue()
        self._context = zmq.Context()
        self._near, self._far = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._far.bind("inproc://wake")
        self._near.connect("inproc://wake")
        self._wake_lock = threading.Lock()
        self._links: dict[Endpoint, _Link] = {}
        self._pending: dict[bytes, _Pending] = {}
        self._salts: dict[Endpoint, bytes] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="hma-claims", daemon=True)
        self._thread.start()

    def ask(self, endpoint: Endpoint, message: Request, *, timeout: float, on_reply: OnReply) -> None:
        """Send a question. `on_reply(reply, sent_at)` follows within `timeout` seconds. Never blocks."""
        self._command(_Question(endpoint, message, timeout, on_reply))

    def drop(self, endpoint: Endpoint) -> None:
        """Close the socket to a peer; the next question opens a new one."""
        self._command(endpoint)

    def wake(self) -> None:
        """Let `on_tick` run soon."""
        with self._wake_lock:
            if not self._closed:
                try:
                    self._near.send(b"", zmq.NOBLOCK)
                except zmq.Again:  # the thread has a thousand wake-ups waiting already
                    logger.debug("control client is behind")

    def close(self) -> None:
        """Stop the thread after what is queued has been sent. May be called twice."""
        if not self._closed:
            self._command(None)
            self._thread.join(timeout=5)
            with self._wake_lock:
                self._closed = True
                self._near.close(linger=0)
            self._context.destroy(linger=200)

    def _command(self, command: _Question | Endpoint | None) -> None:
        self._commands.put(command)
        self.wake()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._far, zmq.POLLIN)
        running = True
        while running:
            now = self._clock()
            self._expire(now)
            due = self._guarded(self._on_tick, now)
            deadlines = [pending.deadline for pending in self._pending.values()]
            next_due = min([*deadlines, *([due] if due is not None else [])], default=None)
            timeout = None if next_due is None else max(1, int((next_due - now) * 1000) + 1)
            for socket, _ in poller.poll(timeout):
                self._serve(socket, poller)
            running = self._run_commands(poller)
        for link in self._links.values():
            link.close(linger=200)
        self._far.close(linger=0)

    def _serve(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        """Something has come in: a wake-up, a reply, or news of a connection."""
        if socket is self._far:
            self._drain_wakes()
            return
        for endpoint, link in list(self._links.items()):
            if socket is link.monitor:
                recv_monitor_message(socket, zmq.NOBLOCK)
                self._lose(endpoint)
                return
        self._receive(socket, poller)

    def _lose(self, endpoint: Endpoint) -> None:
        """The connection to a peer is lost, and with it every question under way. ZeroMQ connects again by itself."""
        for nonce in [nonce for nonce, pending in self._pending.items() if pending.question.endpoint == endpoint]:
            pending = self._pending.pop(nonce)
            lost = PeerUnreachable(f"The connection to {_name(endpoint)} is lost or refused.")
            self._guarded(pending.question.on_reply, lost, pending.sent_at)

    def _drain_wakes(self) -> None:
        try:
            while True:
                self._far.recv(zmq.NOBLOCK)
        except zmq.Again:
            return

    def _run_commands(self, poller: zmq.Poller) -> bool:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, _Question):
                self._send(command, poller)
            else:
                self._drop(command, poller)

    def _send(self, question: _Question, poller: zmq.Poller) -> None:
        now = self._clock()
        salt = self._salts.get(question.endpoint, b"")
        try:
            frame, nonce = self._codec.request(question.message, salt)
            self._socket(question.endpoint, poller).send(frame, zmq.NOBLOCK)
            self._pending[nonce] = _Pending(question, now, now + question.timeout, salt)
        except (zmq.ZMQError, ValueError, TypeError) as error:
            unreachable = PeerUnreachable(f"Cannot reach {_name(question.endpoint)}: {error}.")
            self._guarded(question.on_reply, unreachable, now)

    def _socket(self, endpoint: Endpoint, poller: zmq.Poller) -> zmq.Socket[bytes]:
        if endpoint not in self._links:
            socket = open_socket(self._context, endpoint)
            link = _Link(socket, socket.get_monitor_socket(LOST))
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
            self._links[endpoint] = link
        return self._links[endpoint].socket

    def _drop(self, endpoint: Endpoint, poller: zmq.Poller) -> None:
        self._salts.pop(endpoint, None)
        if (link := self._links.pop(endpoint, None)) is not None:
            poller.unregister(link.socket)
            poller.unregister(link.monitor)
            link.close(linger=0)

    def _receive(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        try:
            frames = socket.recv_multipart(zmq.NOBLOCK)
            reply, nonce = read_reply(self._codec, frames[-1])
        except zmq.ZMQError:
            return
        except ProtocolError as error:
            logger.warning("control channel: a reply was dropped: %s", error)
            return
        pending = self._pending.pop(nonce, None)
        if pending is None:
            return
        endpoint = pending.question.endpoint
        if isinstance(reply, Refused) and reply.salt and reply.salt != pending.salt and self._codec.keys:
            # The server has (another) salt: seal the question with it. One that never fits ends with the deadline.
            self._salts[endpoint] = reply.salt
            left, resealed = pending.deadline - self._clock(), pending.question.resealed
            if left > 0 and resealed < MAX_RESEALED:
                self._send(replace(pending.question, timeout=left, resealed=resealed + 1), poller)
                return
        self._guarded(pending.question.on_reply, reply, pending.sent_at)

    def _expire(self, now: float) -> None:
        for nonce in [nonce for nonce, pending in self._pending.items() if pending.deadline <= now]:
            pending = self._pending.pop(nonce)
            question = pending.question
            silent = PeerSilent(f"No answer from {_name(question.endpoint)} within {question.timeout:g} s.")
            self._guarded(question.on_reply, silent, pending.sent_at)

    @staticmethod
    def _guarded(call: Callable[..., T], *args: object) -> T | None:
        """Nothing that a reply leads to may end the thread."""
        try:
            return call(*args)
        except Exception:
            logger.exception("control channel: a callback failed")
            return None


def describe(host: str, port: int, *, timeout: float = 5.0, codec: Codec | None = None) -> EngineDescription:
    """Ask one engine who it is. PeerUnreachable when it does not answer, ProtocolError when it refuses."""
    codec = codec or Codec(keys_from_environment())
    with zmq.Context() as context:
        socket = open_socket(context, (host, port))
        try:
            reply = _asked(socket, codec, (host, port), timeout, b"")
            if isinstance(reply, Refused) and reply.salt and codec.keys:
                reply = _asked(socket, codec, (host, port), timeout, reply.salt)
        finally:
            socket.close(linger=0)
    if isinstance(reply, Refused):
        raise ProtocolError(f"{_name((host, port))} refuses: {reply.reason}. {reply.detail}")
    if not isinstance(reply, Described):
        raise ProtocolError(f"{_name((host, port))} gave an answer to another question.")
    return reply.engine


def read_reply(codec: Codec, frame: bytes) -> tuple[Reply, bytes]:
    """A reply and its nonce, sealed as it must be, or the one that says how requests are to be sealed."""
    try:
        return codec.read_reply(frame)
    except Unauthorised:
        salt, nonce = codec.read_salt(frame)
        return Refused(reason="unauthorised", salt=salt), nonce


def _asked(socket: zmq.Socket[bytes], codec: Codec, endpoint: Endpoint, timeout: float, salt: bytes) -> Reply:
    frame, nonce = codec.request(Describe(), salt)
    socket.send(frame)
    if not socket.poll(int(timeout * 1000)):
        raise PeerSilent(f"No answer from {_name(endpoint)} within {timeout:g} s.")
    reply, answered = read_reply(codec, socket.recv())
    if answered != nonce:
        raise ProtocolError(f"{_name(endpoint)} gave an answer to another question.")
    return reply


def open_socket(context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint) -> zmq.Socket[bytes]:
    """A DEALER socket to one peer, with limits on size and queue."""
    host, port = endpoint
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME + 64)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
    return socket


def _name(endpoint: Endpoint) -> str:
    return f"{endpoint[0]}:{endpoint[1]}"

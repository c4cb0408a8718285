"""Every error that hma raises on purpose, in one tree.

    HmaError
    ├── ConfigError        a setting or a command line that cannot work
    ├── StackError         a package that is missing, broken or of an untested version
    ├── ModelError         a model that cannot be found, read or served
    ├── ResourceError      ports, memory, cores, files: the machine cannot give what is asked
    ├── ProcessError       a child process that died or never became ready
    ├── ProtocolError      bytes from a peer that are not a valid message
    ├── IncompatiblePeer   two engines whose geometry or versions do not fit
    ├── PeerUnreachable    no connection to a peer
    │   └── PeerSilent     no answer within its deadline
    └── TransportError     the data plane refused or failed a transfer

An error says what is wrong in one sentence, both sides' values where two sides differ, and the remedy.
The code is stable: scripts may match it, logs and metrics carry it.
"""

from __future__ import annotations


class HmaError(Exception):
    """Root of the tree. `message` is one sentence, `remedy` the next step for the reader."""

    code = "error"

    def __init__(self, message: str, *, remedy: str = "", ours: object = None, theirs: object = None) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        sides = "" if self.ours is None and self.theirs is None else f" (ours: {self.ours}, theirs: {self.theirs})"
        remedy = f" {self.remedy}" if self.remedy else ""
        return f"{self.message}{sides}{remedy}"


class ConfigError(HmaError):
    code = "config"


class StackError(HmaError):
    code = "stack"


class ModelError(HmaError):
    code = "model"


class ResourceError(HmaError):
    code = "resource"


class ProcessError(HmaError):
    code = "process"


class ProtocolError(HmaError):
    code = "protocol"


class IncompatiblePeer(HmaError):
    code = "incompatible"


class PeerUnreachable(HmaError):
    code = "unreachable"


class PeerSilent(PeerUnreachable):
    code = "timeout"


class TransportError(HmaError):
    code = "transport"

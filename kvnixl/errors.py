"""The exception tree. Every error that kvnixl raises on purpose derives from `KvNixlError`.

Bad arguments also derive from the builtin that fits (`ValueError`, `IndexError`), so that callers
who know nothing of kvnixl handle them as usual.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class KvNixlError(Exception):
    """Base of all errors that kvnixl raises on purpose."""


class ClosedError(KvNixlError):
    """The object was closed; nothing was done."""


class ConfigError(KvNixlError, ValueError):
    """An option is unknown, ill-typed or out of range. The message names it and the remedy."""


# --- NIXL ---------------------------------------------------------------------------------------


class NixlUnavailableError(KvNixlError):
    """NIXL cannot be imported or has no usable backend on this machine."""


class AgentError(KvNixlError):
    """A NIXL call failed.

    Attributes:
        operation: the NIXL call, as NIXL names it (``"make_prepped_xfer"``).
        peer: the remote agent's name, or ``None`` for a call without a peer.
    """

    def __init__(self, operation: str, reason: object, *, peer: str | None = None) -> None:
        self.operation = operation
        self.peer = peer
        where = f" to peer {peer!r}" if peer is not None else ""
        super().__init__(f"NIXL {operation}{where} failed: {reason}")


class PeerDisconnectedError(AgentError):
    """The remote agent is gone (its process died or its endpoint was closed)."""


class RegistrationError(AgentError):
    """Memory could not be registered or deregistered."""


class DescriptorError(AgentError):
    """NIXL refused descriptors or indices."""


class TransferError(AgentError):
    """A transfer could not be made, posted or finished."""


class ReleaseError(AgentError):
    """A handle could not be released now (NIXL cannot cancel what runs); try again later."""


class RequestInProgressError(KvNixlError, ValueError):
    """A request of that id has no outcome yet; collect it with ``step()``, or abort it first.

    Attributes:
        request_id: the id.
    """

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        super().__init__(
            f"request {request_id!r} is being read already: wait for its outcome before its id is "
            "used again"
        )


class TransportError(KvNixlError):
    """A block transport cannot do what was asked in its present state."""


# --- layout and topology ------------------------------------------------------------------------


class LayoutError(KvNixlError, ValueError):
    """Memory does not form a KV cache of equal blocks. The message names layer and numbers."""


class TopologyError(KvNixlError, ValueError):
    """Two engines' KV caches cannot be mapped onto each other. The message names both sides' values
    and what to change."""


class BlockListError(TopologyError):
    """The block lists of one request do not fit each other or the caches they address."""


# --- peers --------------------------------------------------------------------------------------


class WireError(KvNixlError, ValueError):
    """Bytes or parameters from outside do not decode to what they should be."""


class HandshakeError(KvNixlError):
    """A handshake with a peer failed. Subclasses say why."""


class TransferParamsError(WireError):
    """A key of ``kv_transfer_params`` is missing, ill-typed or out of range.

    Attributes:
        request_id: the request whose parameters they are.
        key: the offending key, or ``None`` if the parameters as a whole are unusable.
    """

    def __init__(self, request_id: str, key: str | None, reason: str) -> None:
        self.request_id = request_id
        self.key = key
        what = f"kv_transfer_params[{key!r}]" if key is not None else "kv_transfer_params"
        shown = request_id if len(request_id) <= 200 else request_id[:200] + "..."
        super().__init__(f"request {shown!r}: {what}: {reason}")


class CompatibilityError(HandshakeError):
    """The peer's configuration differs in a way that makes its KV cache unusable here.

    Attributes:
        local_hash: this engine's compatibility hash.
        remote_hash: the peer's.
        differences: the differing factors (`kvnixl.compat.Difference`), empty if the peer did not
            send its factors (a stock vLLM).
    """

    def __init__(
        self, message: str, *, local_hash: str, remote_hash: str, differences: Sequence[Any] = ()
    ) -> None:
        self.local_hash = local_hash
        self.remote_hash = remote_hash
        self.differences = tuple(differences)
        super().__init__(message)


class EngineIdMismatchError(HandshakeError):
    """Another engine answered than the one that was asked for."""

    def __init__(self, expected: str, actual: str) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"expected engine {expected!r}, but engine {actual!r} answered: check the host and "
            f"port that the producer advertises"
        )


class IncarnationChangedError(HandshakeError):
    """The peer was restarted: the same engine id answers from another start of the engine.

    Only a caller of `kvnixl.HandshakeClient` that names ``incarnations`` gets it. A `kvnixl.Reader`
    names none: it meets an engine again that was restarted.
    """

    def __init__(self, engine_id: str, expected: int, actual: int | None) -> None:
        self.engine_id = engine_id
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"engine {engine_id!r} was restarted: expected incarnation {expected}, got {actual}"
        )


class HandshakeRefusedError(HandshakeError):
    """The peer answered the request with an error.

    Attributes:
        code: a short name, see `kvnixl.wire.ErrorCode`.
        reason: the peer's own words, shortened.
    """

    def __init__(self, code: str, reason: str) -> None:
        self.code = code
        self.reason = reason
        super().__init__(f"the peer refused the handshake: {code!a}: {reason!a}")


class HandshakeReplyError(HandshakeError):
    """The peer's answer is no handshake reply, or what it exports is inconsistent."""


class HandshakeTimeoutError(HandshakeError):
    """The peer did not finish the handshake within the deadline.

    Attributes:
        host: the peer's side-channel host.
        port: its side-channel port.
        timeout: seconds that were granted.
        connected: whether a connection stood, so that only the answer was missing.
    """

    def __init__(
        self, host: str, port: int, timeout: float, *, connected: bool, hint: str = ""
    ) -> None:
        self.host = host
        self.port = port
        self.timeout = timeout
        self.connected = connected
        if connected:
            reason = "it accepted the connection but did not answer: the engine hangs or is stopped"
        else:
            reason = (
                "no connection came about: the engine is down, the port is not its side channel, "
                "or packets are dropped on the way"
            )
        super().__init__(f"no handshake with {host}:{port} within {timeout:g} s; {reason}{hint}")


class HandshakeConnectError(HandshakeError):
    """The peer's machine, or one on the way, says that there is nothing to connect to.

    Attributes:
        host: the peer's side-channel host.
        port: its side-channel port.
        reason: the operating system's words (``"Connection refused"``).
    """

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        self.reason = reason
        super().__init__(
            f"no handshake with {host}:{port}: {reason}; the engine is down or still starting, or "
            f"this is not the address of its side channel"
        )


class HostResolutionError(HandshakeError):
    """A peer's host name does not resolve.

    Attributes:
        host: the name.
    """

    def __init__(self, host: str, reason: object) -> None:
        self.host = host
        super().__init__(f"host {host!r} cannot be resolved: {reason}")


class RemoteNotAllowedError(HandshakeError):
    """A request names a remote host that this engine must not connect to.

    Attributes:
        host: the host that the request named.
        address: the address it resolved to, if that is what was refused.
    """

    def __init__(self, host: str, address: str | None = None) -> None:
        self.host = host
        self.address = address
        what = f"host {host!r}" if address is None else f"host {host!r} ({address})"
        super().__init__(
            f"{what} is not in the list of allowed remote hosts: add it there if this engine may "
            f"read from it"
        )


class SideChannelBindError(KvNixlError):
    """The side channel cannot listen where it was told to.

    Attributes:
        host: the host to bind.
        port: the port to bind.
    """

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        super().__init__(f"the side channel cannot listen on {host!r} port {port}: {reason}")

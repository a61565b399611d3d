"""The side channel: serves this engine's handshake payloads and asks those of its peers.

`HandshakeServer` is one ZeroMQ ROUTER socket in one thread. `HandshakeClient` asks several peers at
once and is driven by `HandshakeClient.poll`. Both speak the base protocol of vLLM's NixlConnector,
so either end may be a stock vLLM of the same version. Both can encrypt (`kvnixl.keys`), and
`RemoteAllowList` bounds the hosts that a request may make this engine connect to.

pyzmq is imported when a server is started or a peer is asked.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import math
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvnixl.compat import CompatibilityCheck
from kvnixl.deadlines import ClockOffset
from kvnixl.errors import (
    ClosedError,
    ConfigError,
    HandshakeConnectError,
    HandshakeError,
    HandshakeRefusedError,
    HandshakeReplyError,
    HandshakeTimeoutError,
    HostResolutionError,
    KvNixlError,
    RemoteNotAllowedError,
    SideChannelBindError,
    WireError,
)
from kvnixl.keys import CurveClientKeys, CurveServerKeys
from kvnixl.loglimit import LogLimiter
from kvnixl.wire import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    ErrorCode,
    OpenedHandshake,
    decode_get_meta,
    encode_clock,
    encode_error_reply,
    encode_get_meta,
    open_handshake,
)

if TYPE_CHECKING:
    import zmq

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "MAX_RANKS",
    "HandshakeClient",
    "HandshakeDone",
    "HandshakeFailed",
    "HandshakeOutcome",
    "HandshakeServer",
    "PeerAddress",
    "Rank",
    "RemoteAllowList",
    "ServerCounters",
    "check_advertised_host",
    "tcp_endpoint",
]

logger = logging.getLogger(__name__)

Rank = tuple[int, int]
"""(pipeline-parallel rank, tensor-parallel rank) of a worker."""

DEFAULT_TIMEOUT_S = 5.0
"""Seconds for the handshake with one peer."""

MAX_RANKS = 4096
"""Workers that one handshake may ask."""

# Far above any question (an identity, a delimiter, a question) and read in a few milliseconds.
_MAX_MESSAGE_FRAMES = 1024

_TcpSocket = socket.socket

_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,255}")
_ADDRESSES_PER_NAME = 4
_SPARE_DESCRIPTORS = 8


# --- addresses ----------------------------------------------------------------------------------


def _bare_host(host: str) -> str:
    """The host without the brackets of an IPv6 literal.

    Raises:
        ValueError: it is neither an address nor a host name.
    """
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not _HOST.fullmatch(bare) or (":" in bare and _as_ip(bare) is None):
        raise ValueError(f"{host[:80]!r} is neither an IP address nor a host name")
    return bare


def _as_ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The literal's address, an IPv4 address that is written as IPv6 as IPv4; ``None`` for a
    host name."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def tcp_endpoint(host: str, port: int) -> str:
    """The ZeroMQ endpoint, with an IPv6 literal in brackets.

    Raises:
        ValueError: not a host, or a port outside 0 .. 65535.
    """
    bare = _bare_host(host)
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} is not in 0 .. 65535")
    return f"tcp://[{bare}]:{port}" if ":" in bare else f"tcp://{bare}:{port}"


def check_advertised_host(host: str, *, option: str = "the host argument") -> str:
    """The host that peers are told to connect to, without brackets.

    Args:
        host: an address or a name.
        option: what the user sets it with (an option, an environment variable), for the message.

    Raises:
        ConfigError: peers cannot connect to such an address.
    """
    try:
        bare = _bare_host(host)
    except ValueError as error:
        raise ConfigError(f"{error}: set {option} to an address of this machine") from None
    address = _as_ip(bare)
    if address is not None and (
        address.is_unspecified
        or address.is_multicast
        or address == ipaddress.IPv4Address("255.255.255.255")
    ):
        raise ConfigError(
            f"{host} cannot be advertised to peers, it is no address that one can connect to: set "
            f"{option} to an address of this machine that peers can reach"
        )
    return bare


def _is_loopback(host: str) -> bool:
    address = _as_ip(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


class RemoteAllowList:
    """The hosts and networks that a request may name as its remote engine.

    Transfer parameters come from clients. Without such a list they may name any host.

    Args:
        entries: addresses (``"10.0.0.7"``), networks (``"10.0.0.0/8"``, ``"fd00::/8"``), host names
            and, for all names below a domain, ``"*.prefill.svc"``. An empty list allows nothing.

    Raises:
        ConfigError: an entry is none of these.
    """

    def __init__(self, entries: Iterable[str]) -> None:
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: set[str] = set()
        self._domains: set[str] = set()
        if isinstance(entries, str):
            raise ConfigError(f"allowed remote hosts: expected a list, got the text {entries!r}")
        for entry in entries:
            self._add(entry)

    def _add(self, entry: str) -> None:
        text = entry.strip()
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        try:
            self._networks.append(ipaddress.ip_network(text))
            return
        except ValueError as error:
            reason = str(error)
        name = text.removeprefix("*.")
        # "10.0.0.7/8" and "10.0.0.300" are mistyped addresses, not names.
        if not _HOST.fullmatch(name) or ":" in name or re.fullmatch(r"[0-9.]+", name):
            raise ConfigError(f"allowed remote hosts: {entry!r} is no host or network ({reason})")
        (self._domains if text.startswith("*.") else self._names).add(_canonical_name(name))

    def check(self, host: str) -> None:
        """Refuse a host that is certainly not allowed.

        A name that is not listed passes while networks are listed: only its address can tell
        (`check_address`, which the client does before it connects).

        Raises:
            RemoteNotAllowedError: the host is not in the list.
        """
        if self._has_name(host):
            return
        address = _as_ip(host.strip("[]"))
        if address is None and self._networks:
            return
        if address is None or not self._has_address(address):
            raise RemoteNotAllowedError(host)

    def check_address(self, host: str, address: str) -> None:
        """Refuse an address that ``host`` resolved to, unless the list holds either of them.

        Raises:
            RemoteNotAllowedError: neither is in the list.
        """
        ip = _as_ip(address)
        if not self._has_name(host) and (ip is None or not self._has_address(ip)):
            raise RemoteNotAllowedError(host, address)

    def _has_name(self, host: str) -> bool:
        name = _canonical_name(host)
        if name in self._names:
            return True
        labels = name.split(".")
        return any(".".join(labels[i:]) in self._domains for i in range(1, len(labels)))

    def _has_address(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        return any(address in network for network in self._networks)


def _canonical_name(name: str) -> str:
    return name.lower().rstrip(".")


# --- server -------------------------------------------------------------------------------------


@dataclass(slots=True)
class ServerCounters:
    """What the server did since it was made, one counter per cause.

    Attributes:
        replies: questions answered with metadata.
        bad_envelopes: messages without the empty delimiter of a question; not answered.
        overlong_messages: messages of too many frames; each ended all connections, since ZeroMQ
            hands out nothing else before the last frame. Peers connect again by themselves.
        bad_requests: questions that cannot be read; refused.
        unknown_ranks: questions for a worker that this engine does not have; refused.
        not_ready: questions before anything was published; refused.
        undeliverable: answers that found their client gone or not reading.
        denied_clients: connections whose CURVE key is not allowed.
        internal_errors: unexpected exceptions; each also logged.
    """

    replies: int = 0
    bad_envelopes: int = 0
    overlong_messages: int = 0
    bad_requests: int = 0
    unknown_ranks: int = 0
    not_ready: int = 0
    undeliverable: int = 0
    denied_clients: int = 0
    internal_errors: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


class HandshakeServer:
    """Serves handshake payloads to peers, from one thread.

    The payloads are opaque bytes (`kvnixl.wire.encode_handshake_payload`) per worker. Whatever a
    peer sends is answered, refused or ignored, and counted in ``counters``; it never ends the
    thread and never delays the next peer.

    Args:
        host: address or name to bind; ``"0.0.0.0"``, ``"::"`` or ``"*"`` for all interfaces.
        port: port to bind; 0 takes a free one, see ``port`` once started.
        advertised_host: what peers are told to connect to; ``host`` by default.
        curve: encrypt, and serve only clients that know the server's public key.
        clock: the clock that deadlines in transfer parameters are stamped with.
        host_option: what the user sets the host with, for messages.
        port_option: what the user sets the port with, for messages.

    Attributes:
        port: the port to bind, once started the bound one.
        counters: what was served and refused.

    Raises:
        ConfigError: a host cannot be bound or advertised, or the port is out of range.
    """

    STOP_TIMEOUT_S = 1.0
    _BATCH = 64

    def __init__(
        self,
        host: str,
        port: int,
        *,
        advertised_host: str | None = None,
        curve: CurveServerKeys | None = None,
        clock: Callable[[], float] = time.perf_counter,
        host_option: str = "the host argument",
        port_option: str = "the port argument",
    ) -> None:
        try:
            self._host = "*" if host == "*" else _bare_host(host)
        except ValueError as error:
            raise ConfigError(f"{error}: set {host_option}") from None
        if not 0 <= port <= 65535:
            raise ConfigError(f"port {port} is not in 0 .. 65535: set {port_option}")
        self.advertised_host = check_advertised_host(
            host if advertised_host is None else advertised_host, option=host_option
        )
        self.port = port
        self.counters = ServerCounters()
        self._host_option = host_option
        self._port_option = port_option
        self._curve = curve
        self._clock = clock
        self._limiter = LogLimiter(logger)
        self._payloads: dict[Rank, zmq.Frame] = {}
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False
        self._wake: socket.socket | None = None

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) to tell peers."""
        return self.advertised_host, self.port

    @property
    def running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def publish(self, payloads: Mapping[Rank, bytes]) -> None:
        """Replace what is served, all at once; also while serving."""
        import zmq

        # ZeroMQ owns the copy, and each reply refers to it: a client that does not read costs no
        # further memory.
        self._payloads = {rank: zmq.Frame(payload, copy=True) for rank, payload in payloads.items()}

    def start(self, payloads: Mapping[Rank, bytes] | None = None) -> None:
        """Bind and serve. When this returns, peers can connect.

        Args:
            payloads: as for `publish`.

        Raises:
            SideChannelBindError: the address cannot be bound; says which option to change.
            ClosedError: the server was stopped.
        """
        if self._closed:
            raise ClosedError("this handshake server was stopped: make a new one")
        if self._thread is not None:
            raise KvNixlError("the handshake server was started already: use publish()")
        if payloads is not None:
            self.publish(payloads)
        import zmq

        listener = self._listen()
        context = zmq.Context()
        wake, wake_end = socket.socketpair()
        try:
            zap = self._open_zap(context)
            router = self._open_router(context, listener)
            # The sockets were made here and are used by the thread only; starting it is the
            # barrier that ZeroMQ asks for.
            thread = threading.Thread(
                target=self._run,
                args=(context, listener, router, zap, wake_end),
                name="kvnixl-handshake-server",
                daemon=True,
            )
            thread.start()
        except BaseException:
            wake.close()
            wake_end.close()
            context.destroy(linger=0)
            listener.close()
            raise
        self._wake = wake
        self._thread = thread
        self._warn_about_advertised_host()

    def close(self) -> None:
        """Stop serving and join the thread, within a second. May be called more than once."""
        self._closed = True
        thread = self._thread
        if thread is None or self._wake is None:
            return
        self._stopping = True
        self._wake.close()  # readable at the other end
        thread.join(self.STOP_TIMEOUT_S)
        if thread.is_alive():
            logger.error("The handshake server's thread did not stop within a second.")
        self._wake = None

    def __enter__(self) -> HandshakeServer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # Start-up, in the caller's thread.

    def _listen(self) -> socket.socket:
        """Bind the port. It stays ours when the ROUTER is replaced."""
        try:
            address = self._bind_address()
            if address == "*":
                dual = socket.has_dualstack_ipv6()
                address = "::" if dual else "0.0.0.0"
            ipv6 = ":" in address
            listener = socket.create_server(
                (address, self.port),
                family=socket.AF_INET6 if ipv6 else socket.AF_INET,
                backlog=1024,
                dualstack_ipv6=ipv6,
            )
        except OSError as error:
            raise self._bind_error(error.errno, error.strerror or str(error)) from None
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        return listener

    def _open_router(self, context: zmq.Context[Any], listener: socket.socket) -> zmq.Socket[bytes]:
        import zmq

        router: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        router.set(zmq.LINGER, 0)
        # Larger frames end the connection inside ZeroMQ, before they are received whole.
        router.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        # A send to a client that does not read, or is gone, fails at once and is counted.
        router.set(zmq.ROUTER_MANDATORY, 1)
        router.set(zmq.SNDHWM, 128)
        router.set(zmq.RCVHWM, 128)
        # Half-open connections and strangers that never greet are dropped.
        router.set(zmq.HANDSHAKE_IVL, 5_000)
        router.set(zmq.HEARTBEAT_IVL, 15_000)
        router.set(zmq.HEARTBEAT_TIMEOUT, 10_000)
        if self._curve is not None:
            router.set(zmq.CURVE_SERVER, 1)
            router.set(zmq.CURVE_PUBLICKEY, self._curve.pair.public)
            router.set(zmq.CURVE_SECRETKEY, self._curve.pair.secret)
            if self._curve.allowed_clients is not None:
                router.set(zmq.ZAP_DOMAIN, b"kvnixl")
        try:
            router.set(zmq.USE_FD, os.dup(listener.fileno()))  # ZeroMQ closes it
            router.bind(f"tcp://*:{self.port}")  # the address is that of the descriptor
        except BaseException:
            router.close(linger=0)
            raise
        return router

    def _open_zap(self, context: zmq.Context[Any]) -> zmq.Socket[bytes] | None:
        """The socket on which ZeroMQ asks whether a client's key is allowed."""
        import zmq

        if self._curve is None or self._curve.allowed_clients is None:
            return None
        zap: zmq.Socket[bytes] = context.socket(zmq.REP)
        zap.set(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
        return zap

    def _bind_address(self) -> str:
        """A literal to bind, or ``"*"``. An IPv4 address is preferred, since a stock peer resolves
        names to IPv4 only."""
        if self._host in ("*", "::"):
            return "*"
        if _as_ip(self._host) is not None:
            return self._host
        try:
            found = socket.getaddrinfo(self._host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise SideChannelBindError(
                self._host,
                self.port,
                f"the name does not resolve ({error}): change {self._host_option}",
            ) from None
        found.sort(key=lambda entry: entry[0] != socket.AF_INET)
        return str(found[0][4][0])

    def _bind_error(self, number: int | None, reason: str) -> SideChannelBindError:
        if number == errno.EADDRINUSE:
            reason = (
                f"the port is in use, by another engine on this machine perhaps: set "
                f"{self._port_option} to a free port"
            )
        elif number in (errno.EADDRNOTAVAIL, errno.ENODEV, errno.EINVAL):
            reason = (
                f"that is no address of this machine: set {self._host_option} to one, or to "
                f"0.0.0.0 for all of them"
            )
        elif number in (errno.EACCES, errno.EPERM):
            reason = (
                f"the process may not bind this port: set {self._port_option} to one above 1023"
            )
        else:
            reason = f"{reason}: check {self._host_option} and {self._port_option}"
        return SideChannelBindError(self._host, self.port, reason)

    def _warn_about_advertised_host(self) -> None:
        bound_to_loopback = self._host != "*" and _is_loopback(self._host)
        advertised_loopback = _is_loopback(self.advertised_host)
        if advertised_loopback and not bound_to_loopback:
            logger.warning(
                "Peers are told to connect to %s, which reaches this engine from this machine "
                "only: set %s to an address that other machines can reach.",
                self.advertised_host,
                self._host_option,
            )
        elif bound_to_loopback and not advertised_loopback:
            logger.warning(
                "The side channel listens on %s but peers are told to connect to %s: they can "
                "only if something forwards the connection. Set %s.",
                self._host,
                self.advertised_host,
                self._host_option,
            )

    # The thread.

    def _run(
        self,
        context: zmq.Context[Any],
        listener: socket.socket,
        router: zmq.Socket[bytes] | None,
        zap: zmq.Socket[bytes] | None,
        wake_end: socket.socket,
    ) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(wake_end, zmq.POLLIN)
        poller.register(router, zmq.POLLIN)
        if zap is not None:
            poller.register(zap, zmq.POLLIN)
        try:
            while not self._stopping:
                try:
                    if router is None:
                        router = self._open_router(context, listener)
                        poller.register(router, zmq.POLLIN)
                    ready = dict(poller.poll())
                    if zap is not None and zap in ready:
                        self._answer_zap(zap)
                    if router in ready and not self._serve(router):
                        # The rest of that message comes before anything of another peer. Without
                        # its socket ZeroMQ drops it; the peers connect to the next one.
                        poller.unregister(router)
                        router.close(linger=0)
                        router = None
                except Exception:
                    self.counters.internal_errors += 1
                    logger.exception("The handshake server met an unexpected error and goes on.")
                    time.sleep(0.05)  # whatever it was must not become a busy loop
        finally:
            wake_end.close()
            context.destroy(linger=0)
            listener.close()

    def _serve(self, router: zmq.Socket[bytes]) -> bool:
        """Answer what has come. ``False``: the socket is in the middle of an overlong message."""
        import zmq

        for _ in range(self._BATCH):
            if self._stopping:
                break
            try:
                frames, total = _receive(router, keep=3, most=_MAX_MESSAGE_FRAMES + 1)
            except zmq.Again:
                break
            identity = frames[0]
            if total > _MAX_MESSAGE_FRAMES:
                self.counters.overlong_messages += 1
                self._limiter.warning(
                    "overlong",
                    "Closed all connections of the side channel: %s sent a message of more than %d "
                    "frames. Keep strangers off its port.",
                    _peer_of(identity),
                    _MAX_MESSAGE_FRAMES,
                )
                return False
            if total < 3 or len(frames[1]) > 0:
                self.counters.bad_envelopes += 1
                self._limiter.warning(
                    "envelope",
                    "Ignored a message of %d frame(s) from %s on the side channel: not a question.",
                    total - 1,
                    _peer_of(identity),
                )
                continue
            self._warn_about_far_peer(identity)
            reply = self._answer(frames[2], total, identity)
            try:
                router.send_multipart([identity, b"", *reply], flags=zmq.NOBLOCK, copy=False)
            except zmq.ZMQError as error:
                if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                    raise
                self.counters.undeliverable += 1
        return True

    def _answer(
        self, question: zmq.Frame, total: int, identity: zmq.Frame
    ) -> Sequence[zmq.Frame | bytes]:
        """The frames that follow the delimiter."""
        payloads = self._payloads
        try:
            if total != 3:
                raise WireError(f"a question has 1 frame, got {total - 2}")
            rank = decode_get_meta(question.bytes)
        except WireError as error:
            self.counters.bad_requests += 1
            self._limiter.warning(
                "request", "Refused a question from %s: %s.", _peer_of(identity), error
            )
            return encode_error_reply(ErrorCode.BAD_REQUEST, str(error))
        payload = payloads.get(rank)
        if payload is not None:
            self.counters.replies += 1
            return payload, encode_clock(self._clock())
        if not payloads:
            self.counters.not_ready += 1
            return encode_error_reply(ErrorCode.NOT_READY, "nothing is registered yet")
        self.counters.unknown_ranks += 1
        reason = (
            f"no worker with pipeline rank {rank.pp_rank} and tensor rank {rank.tp_rank}; there "
            f"are {1 + max(pp for pp, _ in payloads)} x {1 + max(tp for _, tp in payloads)}"
        )
        self._limiter.warning("rank", "Refused a question from %s: %s.", _peer_of(identity), reason)
        return encode_error_reply(ErrorCode.UNKNOWN_RANK, reason)

    def _warn_about_far_peer(self, identity: zmq.Frame) -> None:
        if not _is_loopback(self.advertised_host):
            return
        peer = _peer_of(identity)
        if _as_ip(peer) is not None and not _is_loopback(peer):
            self._limiter.warning(
                "far peer",
                "%s asks for metadata, but this engine tells its peers to connect to %s: set %s to "
                "an address that other machines can reach.",
                peer,
                self.advertised_host,
                self._host_option,
            )

    def _answer_zap(self, zap: zmq.Socket[bytes]) -> None:
        import zmq
        from zmq.utils import z85

        assert self._curve is not None
        assert self._curve.allowed_clients is not None
        try:
            frames = zap.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        # version, request id, domain, address, identity, mechanism, credentials
        version, request_id = frames[0], frames[1]
        allowed = (
            len(frames) == 7
            and frames[5] == b"CURVE"
            and len(frames[6]) == 32
            and z85.encode(frames[6]) in self._curve.allowed_clients
        )
        status = (b"200", b"OK") if allowed else (b"400", b"client key not allowed")
        if not allowed:
            self.counters.denied_clients += 1
            self._limiter.warning(
                "zap",
                "Refused a connection from %s: its CURVE key is not among the allowed ones.",
                frames[3].decode("ascii", "replace") if len(frames) > 3 else "?",
            )
        zap.send_multipart([version, request_id, *status, b"", b""])


def _receive(sock: zmq.Socket[bytes], keep: int, most: int) -> tuple[list[zmq.Frame], int]:
    """One message: its first ``keep`` frames, and how many were read.

    Reading stops after ``most`` frames; if there are more, the socket is of no further use. Raises
    ``zmq.Again``.
    """
    import zmq

    frame = sock.recv(zmq.NOBLOCK, copy=False)
    frames = [frame]
    total = 1
    while frame.more and total < most:
        frame = sock.recv(zmq.NOBLOCK, copy=False)
        total += 1
        if total <= keep:
            frames.append(frame)
    return frames, total


def _peer_of(frame: zmq.Frame) -> str:
    """The address of the connection that a received frame came over."""
    try:
        return str(frame.get("Peer-Address"))
    except Exception:
        return "an unknown address"


# --- client -------------------------------------------------------------------------------------


class PeerAddress(NamedTuple):
    """Which engine is expected where."""

    engine_id: str
    host: str
    port: int

    def __str__(self) -> str:
        return f"engine {self.engine_id!r} at {self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class HandshakeDone:
    """A peer answered for every rank that was asked, and fits.

    Attributes:
        peer: the peer as it was given to `HandshakeClient.start`.
        ranks: what each rank exports.
        clock: the peer's clock against ours, from the best round trip.
        seconds: from `HandshakeClient.start` to the last answer.
    """

    peer: PeerAddress
    ranks: dict[Rank, OpenedHandshake] = field(repr=False)
    clock: ClockOffset | None
    seconds: float


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    """No handshake with this peer.

    Attributes:
        peer: the peer as it was given to `HandshakeClient.start`.
        error: why.
        seconds: from `HandshakeClient.start` to the failure.
    """

    peer: PeerAddress
    error: HandshakeError
    seconds: float


HandshakeOutcome = HandshakeDone | HandshakeFailed


class _LookUp:
    """Looks a host name up in a thread of its own: a name server that does not answer must not
    delay other peers."""

    def __init__(self, resolve: Callable[..., Any], host: str, port: int) -> None:
        """Raises ``RuntimeError`` if the process can have no further thread."""
        self.addresses: list[str] | None = None
        self.error: str | None = None
        threading.Thread(
            target=self._run,
            args=(resolve, host, port),
            name="kvnixl-resolve-host",
            daemon=True,
        ).start()

    @property
    def over(self) -> bool:
        return self.addresses is not None or self.error is not None

    def _run(self, resolve: Callable[..., Any], host: str, port: int) -> None:
        try:
            found = resolve(host, port, type=socket.SOCK_STREAM)
            # IPv4 first: a stock peer listens there when it is given a name.
            found = sorted(found, key=lambda entry: entry[0] != socket.AF_INET)
            self.addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        except Exception as error:
            self.error = getattr(error, "strerror", None) or str(error) or type(error).__name__


@dataclass(slots=True)
class _Pending:
    """One handshake under way."""

    peer: PeerAddress
    host: str
    ranks: list[Rank]
    incarnations: Mapping[Rank, int]
    started: float
    timeout: float
    addresses: list[str] | None = None
    look_up: _LookUp | None = None
    retried: bool = False
    socket: zmq.Socket[bytes] | None = None
    probe: _TcpSocket | None = None
    attempt_ends: float = 0.0
    asked_at: float | None = None  # None: not connected yet
    ask_again_at: float | None = None
    pause: float = 0.05
    opened: dict[Rank, OpenedHandshake] = field(default_factory=dict)
    clock: ClockOffset | None = None
    refusal: HandshakeRefusedError | None = None
    ever_connected: bool = False

    @property
    def deadline(self) -> float:
        return self.started + self.timeout

    @property
    def rank(self) -> Rank:
        """The rank to ask next."""
        return self.ranks[len(self.opened)]


def _check_spare_descriptors() -> None:
    """Raise ``OSError`` if few descriptors are left: ZeroMQ aborts the process when it finds none
    for its own threads."""
    spare: list[int] = []
    try:
        for _ in range(_SPARE_DESCRIPTORS):
            spare.append(os.open(os.devnull, os.O_RDONLY))
    finally:
        for descriptor in spare:
            os.close(descriptor)


class HandshakeClient:
    """Asks peers for their metadata, several at once, each with its own deadline.

    Nothing runs between calls of `poll`, which delivers the outcomes. A peer that does not answer
    costs its own handshake only. Not thread-safe: one thread owns the client.

    Args:
        compat: this engine's factors and policy.
        timeout: seconds for one peer, unless `start` is given another (a `kvnixl.Reader` gives its
            ``handshake_timeout``). Within them a lost connection or answer is tried once more,
            after a third of the time.
        allowed: hosts that may be asked; ``None`` allows all.
        curve: encrypt; a peer without CURVE is then not reached.
        clock: seconds; the clock that `ClockOffset` refers to.
        max_concurrent: connections at a time, and look-ups of names at a time; further peers wait,
            their deadlines run.
        resolve: looks up host names, `socket.getaddrinfo` or a stand-in.

    Attributes:
        outcomes: how many handshakes ended how: ``"done"`` or the name of the error's class.
    """

    def __init__(
        self,
        compat: CompatibilityCheck,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        allowed: RemoteAllowList | None = None,
        curve: CurveClientKeys | None = None,
        clock: Callable[[], float] = time.perf_counter,
        max_concurrent: int = 256,
        resolve: Callable[..., Any] = socket.getaddrinfo,
    ) -> None:
        if not 0 < timeout < math.inf:
            raise ConfigError(f"handshake timeout {timeout} is not a positive number of seconds")
        if max_concurrent < 1:
            raise ConfigError(f"max_concurrent {max_concurrent} is not positive")
        self.outcomes: Counter[str] = Counter()
        self._compat = compat
        self._timeout = timeout
        self._allowed = allowed
        self._curve = curve
        self._clock = clock
        self._max_concurrent = max_concurrent
        self._resolve = resolve
        self._pending: dict[PeerAddress, _Pending] = {}
        self._by_socket: dict[zmq.Socket[bytes], _Pending] = {}
        self._by_probe: dict[int, _Pending] = {}  # by file descriptor
        self._look_ups: dict[str, _LookUp] = {}  # by host; also those that nobody waits for
        self._finished: list[HandshakeOutcome] = []
        self._context: zmq.Context[Any] | None = None
        self._poller: zmq.Poller | None = None
        self._closed = False

    @property
    def allowed(self) -> RemoteAllowList | None:
        """The hosts that may be asked; ``None`` allows all."""
        return self._allowed

    def __len__(self) -> int:
        """Handshakes under way."""
        return len(self._pending)

    def start(
        self,
        engine_id: str,
        host: str,
        port: int,
        ranks: Iterable[Rank] = ((0, 0),),
        *,
        incarnations: Mapping[Rank, int] | None = None,
        timeout: float | None = None,
    ) -> bool:
        """Begin a handshake. Its outcome comes out of `poll`, also when it fails at once.

        Args:
            engine_id: the engine that must answer.
            host: the peer's side-channel host, an address (IPv6 with or without brackets) or name.
            port: its side-channel port.
            ranks: the workers to ask, at most `MAX_RANKS`.
            incarnations: the incarnation that a rank must have, for callers that refuse a restarted
                engine; with another one the handshake fails with `IncarnationChangedError`.
            timeout: seconds, instead of the client's.

        Returns:
            ``False`` if a handshake with this engine at this address is under way already.

        Raises:
            ValueError: no ranks or too many, a rank that cannot be asked for, no positive timeout.
            ClosedError: the client was closed.
        """
        self._check_open()
        if timeout is None:
            timeout = self._timeout
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout {timeout} is not a positive number of seconds")
        ranks = list(islice(ranks, MAX_RANKS + 1))
        if len(ranks) > MAX_RANKS:
            raise ValueError(f"a handshake asks at most {MAX_RANKS} ranks, more were given")
        ranks = list(dict.fromkeys(ranks))
        if not ranks:
            raise ValueError("a handshake needs at least one rank to ask")
        for rank in ranks:
            encode_get_meta(*rank)
        peer = PeerAddress(engine_id, host, port)
        if peer in self._pending:
            return False
        pending = _Pending(
            peer,
            host,
            ranks,
            dict(incarnations or {}),
            self._clock(),
            timeout,
        )
        self._pending[peer] = pending
        try:
            self._locate(pending)
        except HandshakeError as error:
            self._fail(pending, error)
        return True

    def cancel(self, peer: PeerAddress) -> bool:
        """Forget a handshake; it has no outcome. Returns whether it was under way."""
        pending = self._pending.get(peer)
        if pending is None:
            return False
        self._drop(pending)
        return True

    def poll(self, timeout: float = 0.0) -> list[HandshakeOutcome]:
        """Move all handshakes on and take what has ended.

        Args:
            timeout: seconds to wait for an outcome while a handshake is under way.

        Raises:
            ClosedError: the client was closed. Nothing that a peer does raises.
        """
        self._check_open()
        if self._pending:
            end = self._clock() + timeout
            while True:
                self._open_connections()
                self._handle_events(end)
                now = self._clock()
                self._expire(now)
                if self._finished or not self._pending or now >= end:
                    break
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        """Give up what is under way and close all sockets. May be called more than once."""
        self._closed = True
        for pending in list(self._pending.values()):
            self._drop(pending)
        self._finished.clear()
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def __enter__(self) -> HandshakeClient:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this handshake client was closed")

    # Where the peer is.

    def _locate(self, pending: _Pending) -> None:
        peer = pending.peer
        try:
            pending.host = _bare_host(peer.host)
        except ValueError as error:
            raise HostResolutionError(peer.host[:80], error) from None
        if not 1 <= peer.port <= 65535:
            raise HostResolutionError(pending.host, f"port {peer.port} is not in 1 .. 65535")
        if self._allowed is not None:
            self._allowed.check(pending.host)
        if _as_ip(pending.host) is not None:
            pending.addresses = [pending.host]
        else:
            self._look_up(pending)

    def _look_up(self, pending: _Pending) -> None:
        """Look the host's name up, if one more look-up is allowed by now."""
        look_up = self._look_ups.get(pending.host)
        if look_up is None or look_up.over:
            if look_up is None and len(self._look_ups) >= self._max_concurrent:
                return
            try:
                look_up = _LookUp(self._resolve, pending.host, pending.peer.port)
            except RuntimeError as error:
                raise HostResolutionError(pending.host, error) from None
            self._look_ups[pending.host] = look_up
        pending.look_up = look_up

    def _take_addresses(self, pending: _Pending) -> None:
        """Take the addresses of a name, if they are there by now, and check them."""
        look_up = pending.look_up
        assert look_up is not None
        if look_up.error is not None or look_up.addresses == []:
            raise HostResolutionError(pending.host, look_up.error or "it has no address")
        if look_up.addresses is None:
            return
        addresses = look_up.addresses[:_ADDRESSES_PER_NAME]
        if self._allowed is not None:
            for address in addresses:
                self._allowed.check_address(pending.host, address)
        # The connection goes to the address that was checked, not to the name.
        pending.addresses = addresses

    # Connections.

    def _open_connections(self) -> None:
        self._look_ups = {host: each for host, each in self._look_ups.items() if not each.over}
        for pending in list(self._pending.values()):
            with self._failing(pending):
                if pending.addresses is None and pending.look_up is None:
                    self._look_up(pending)
                if pending.addresses is None and pending.look_up is not None:
                    self._take_addresses(pending)
                if (
                    pending.addresses is not None
                    and pending.socket is None
                    and len(self._by_socket) < self._max_concurrent
                ):
                    self._connect(pending)

    def _open_socket(self) -> zmq.Socket[bytes]:
        """Raises ``OSError`` (``zmq.ZMQError`` is one), when descriptors run out for example."""
        _check_spare_descriptors()
        import zmq

        if self._context is None:
            context: zmq.Context[Any] = zmq.Context()
            # A closed socket keeps its place until ZeroMQ's own thread has ended it.
            context.set(zmq.MAX_SOCKETS, 2 * self._max_concurrent + 64)
            self._context = context
            self._poller = zmq.Poller()
        sock: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        return sock

    def _connect(self, pending: _Pending) -> None:
        try:
            sock = self._open_socket()
        except OSError as error:
            reason = error.strerror or str(error)
            raise HandshakeError(f"no socket for {pending.peer}: {reason}") from None
        import zmq

        assert self._poller is not None
        assert pending.addresses is not None
        address = pending.addresses[0]
        pending.addresses = [*pending.addresses[1:], address]  # the next one, next time
        try:
            sock.set(zmq.LINGER, 0)
            sock.set(zmq.IPV6, int(":" in address))
            # Writable only once connected: then the round trip leaves the connection out.
            sock.set(zmq.IMMEDIATE, 1)
            sock.set(zmq.MAXMSGSIZE, MAX_REPLY_BYTES)
            sock.set(zmq.RCVHWM, 2)
            sock.set(zmq.RECONNECT_IVL, 100)
            sock.set(zmq.RECONNECT_IVL_MAX, 1_000)
            if self._curve is not None:
                sock.set(zmq.CURVE_SERVERKEY, self._curve.server_public)
                sock.set(zmq.CURVE_PUBLICKEY, self._curve.pair.public)
                sock.set(zmq.CURVE_SECRETKEY, self._curve.pair.secret)
            sock.connect(tcp_endpoint(address, pending.peer.port))
        except zmq.ZMQError as error:
            sock.close(linger=0)
            raise HandshakeError(f"cannot connect to {pending.peer}: {error}") from None
        now = self._clock()
        pending.socket = sock
        pending.asked_at = None
        pending.ask_again_at = None
        pending.attempt_ends = pending.deadline
        if not pending.retried:
            pending.attempt_ends = now + (pending.deadline - now) / 3
        self._by_socket[sock] = pending
        self._poller.register(sock, zmq.POLLOUT)
        if pending.retried:
            self._start_probe(pending, address)

    def _start_probe(self, pending: _Pending, address: str) -> None:
        """Connect without ZeroMQ, which tries again for ever and tells nobody why it must."""
        import zmq

        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return  # the handshake does without
        probe.setblocking(False)
        assert self._poller is not None
        pending.probe = probe
        self._by_probe[probe.fileno()] = pending
        self._poller.register(probe.fileno(), zmq.POLLOUT)
        try:
            number = probe.connect_ex((address, pending.peer.port))
        except OSError as error:  # an address of no interface here
            number = error.errno or errno.EADDRNOTAVAIL
        if number != errno.EINPROGRESS:
            self._take_probe(pending, number)

    def _take_probe(self, pending: _Pending, number: int) -> None:
        self._end_probe(pending)
        if number != 0:
            raise HandshakeConnectError(pending.host, pending.peer.port, os.strerror(number))

    def _end_probe(self, pending: _Pending) -> None:
        probe = pending.probe
        if probe is None:
            return
        assert self._poller is not None
        pending.probe = None
        del self._by_probe[probe.fileno()]
        self._poller.unregister(probe.fileno())
        probe.close()

    def _disconnect(self, pending: _Pending) -> None:
        self._end_probe(pending)
        sock = pending.socket
        if sock is None:
            return
        assert self._poller is not None
        pending.socket = None
        del self._by_socket[sock]
        self._poller.unregister(sock)
        sock.close(linger=0)

    # Questions and answers.

    def _handle_events(self, end: float) -> None:
        import zmq

        wait = max(0.0, self._next_event_at(end) - self._clock())
        if self._poller is None or not self._by_socket:
            if wait > 0:
                time.sleep(wait)
            return
        try:
            events = self._poller.poll(math.ceil(wait * 1000))
        except zmq.ZMQError as error:
            for pending in list(self._by_socket.values()):
                self._fail(pending, HandshakeError(f"{pending.peer} cannot be waited for: {error}"))
            return
        for ready, event in events:
            if isinstance(ready, int):
                self._handle_probe(ready)
                continue
            asked = self._by_socket.get(ready)
            if asked is None:
                continue  # its probe has just ended it
            with self._failing(asked):
                if event & zmq.POLLIN:
                    self._read(asked)
                elif event & zmq.POLLOUT:
                    asked.ever_connected = True
                    self._ask(asked)

    def _handle_probe(self, descriptor: int) -> None:
        pending = self._by_probe.get(descriptor)
        if pending is None:
            return
        assert pending.probe is not None
        number = pending.probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        with self._failing(pending):
            self._take_probe(pending, number)

    @contextlib.contextmanager
    def _failing(self, pending: _Pending) -> Iterator[None]:
        """Whatever is raised inside ends this handshake and no other."""
        try:
            yield
        except HandshakeError as error:
            self._fail(pending, error)
        except Exception as error:
            logger.exception("A handshake with %s met an unexpected error.", pending.peer)
            self._fail(pending, HandshakeReplyError(f"{pending.peer}: {error!r}"))

    def _next_event_at(self, end: float) -> float:
        """When to look again at the latest, with nothing from the network."""
        if self._finished:
            return -math.inf
        soonest = end
        for pending in self._pending.values():
            if pending.addresses is None:
                soonest = min(soonest, self._clock() + 0.005)
            soonest = min(soonest, pending.deadline)
            if pending.socket is not None:
                soonest = min(soonest, pending.attempt_ends)
            if pending.ask_again_at is not None:
                soonest = min(soonest, pending.ask_again_at)
        return soonest

    def _ask(self, pending: _Pending) -> None:
        import zmq

        assert pending.socket is not None
        assert self._poller is not None
        pending.ask_again_at = None
        # Taken before the send: the round trip must enclose all of the question's way.
        pending.asked_at = self._clock()
        try:
            pending.socket.send_multipart([b"", encode_get_meta(*pending.rank)], flags=zmq.NOBLOCK)
        except zmq.Again:  # the connection is gone; ZeroMQ makes a new one
            pending.asked_at = None
            self._poller.modify(pending.socket, zmq.POLLOUT)
            return
        self._poller.modify(pending.socket, zmq.POLLIN)

    def _read(self, pending: _Pending) -> None:
        import zmq

        assert pending.socket is not None
        try:
            frames, total = _receive(pending.socket, keep=3, most=4)
        except zmq.Again:
            return
        received = self._clock()
        if pending.asked_at is None or pending.ask_again_at is not None:
            raise HandshakeReplyError(f"{pending.peer} sent an answer that nothing asked for")
        if total > 3 or len(frames[0]) > 0:
            raise HandshakeReplyError(f"{pending.peer} sent frames that are no answer")
        rank = pending.rank
        try:
            opened = open_handshake(
                [frame.bytes for frame in frames[1:]],
                self._compat,
                expected_engine_id=pending.peer.engine_id,
                expected_incarnation=pending.incarnations.get(rank),
                peer=str(pending.peer),
            )
        except WireError as error:
            raise HandshakeReplyError(f"{pending.peer} sent a bad answer: {error}") from None
        except HandshakeRefusedError as refusal:
            if refusal.code != ErrorCode.NOT_READY:
                raise
            # The peer is starting up: ask again over the same connection.
            pending.refusal = refusal
            pending.ask_again_at = received + pending.pause
            pending.pause = min(2 * pending.pause, 0.5)
            pending.attempt_ends = pending.deadline
            return
        measured = ClockOffset.measure(
            sent=pending.asked_at, received=received, peer_clock=opened.clock
        )
        if measured is not None:
            pending.clock = measured.better(pending.clock)
        pending.refusal = None
        pending.opened[rank] = opened
        if len(pending.opened) < len(pending.ranks):
            self._ask(pending)
            return
        self._drop(pending)
        self.outcomes["done"] += 1
        self._finished.append(
            HandshakeDone(pending.peer, pending.opened, pending.clock, received - pending.started)
        )

    # Time.

    def _expire(self, now: float) -> None:
        for pending in list(self._pending.values()):
            if now >= pending.deadline:
                self._fail(pending, pending.refusal or self._timeout_error(pending))
            elif pending.ask_again_at is not None and now >= pending.ask_again_at:
                with self._failing(pending):
                    self._ask(pending)
            elif pending.socket is not None and now >= pending.attempt_ends:
                pending.retried = True
                self._disconnect(pending)  # the next poll connects anew

    def _timeout_error(self, pending: _Pending) -> HandshakeError:
        if pending.addresses is None:
            reason = "the name server did not answer"
            if pending.look_up is None:
                reason = f"{self._max_concurrent} other names were being looked up all the time"
            return HostResolutionError(pending.host, f"{reason} within {pending.timeout:g} s")
        hint = ""
        if not pending.ever_connected and self._curve is not None:
            hint = "; or the two sides do not agree on CURVE and its keys"
        return HandshakeTimeoutError(
            pending.host,
            pending.peer.port,
            pending.timeout,
            connected=pending.ever_connected,
            hint=hint,
        )

    def _fail(self, pending: _Pending, error: HandshakeError) -> None:
        self._drop(pending)
        self.outcomes[type(error).__name__] += 1
        self._finished.append(HandshakeFailed(pending.peer, error, self._clock() - pending.started))

    def _drop(self, pending: _Pending) -> None:
        self._disconnect(pending)
        self._pending.pop(pending.peer, None)

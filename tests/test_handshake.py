"""The side channel: whatever arrives, the server serves the next peer; whatever a peer does, the
client's other handshakes go on."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import math
import os
import random
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.auth
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnixl import handshake, keys
from kvnixl.compat import CompatibilityCheck
from kvnixl.errors import (
    ClosedError,
    CompatibilityError,
    ConfigError,
    EngineIdMismatchError,
    HandshakeConnectError,
    HandshakeError,
    HandshakeRefusedError,
    HandshakeReplyError,
    HandshakeTimeoutError,
    HostResolutionError,
    IncarnationChangedError,
    KvNixlError,
    RemoteNotAllowedError,
    SideChannelBindError,
)
from kvnixl.handshake import (
    HandshakeClient,
    HandshakeDone,
    HandshakeFailed,
    HandshakeOutcome,
    HandshakeServer,
    PeerAddress,
    RemoteAllowList,
    check_advertised_host,
    tcp_endpoint,
)
from kvnixl.keys import CurveClientKeys, CurveServerKeys
from kvnixl.metadata import KvNixlExtension, NixlAgentMetadata, NixlHandshakePayload
from kvnixl.wire import (
    GetMeta,
    decode_clock,
    encode_agent_metadata,
    encode_clock,
    encode_get_meta,
    encode_handshake_payload,
    encode_reply,
    open_handshake,
)

COMPAT = CompatibilityCheck({"model": "llama", "dtype": "float16"})
SECRET = b"the-agent-metadata-of-this-engine"
GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)


def agent_metadata(
    engine_id: str = "P", incarnation: int | None = None, factors: str | None = None
) -> NixlAgentMetadata:
    extension = None
    if incarnation is not None or factors is not None:
        extension = KvNixlExtension(incarnation=incarnation or 1, factors=factors)
    return NixlAgentMetadata(
        engine_id,
        SECRET,
        kv_caches_base_addr=[1 << 40, 1 << 41],
        device_id=0,
        num_blocks=10,
        block_lens=[4096, 4096],
        block_strides=[4096, 4096],
        kv_cache_layout="HND",
        block_size=16,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
        kvnixl=extension,
    )


def payload(
    metadata: NixlAgentMetadata | bytes | None = None, *, compat_hash: str = COMPAT.hash
) -> bytes:
    if not isinstance(metadata, bytes):
        metadata = encode_agent_metadata(metadata or agent_metadata())
    return encode_handshake_payload(NixlHandshakePayload(compat_hash, metadata))


def wait_for(condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, f"timed out waiting until {what}"
        time.sleep(0.002)


class Clock:
    """The real clock, which a test puts forward where it would have to wait for a time to pass.

    So deadlines can be far away: how fast this machine is decides nothing.
    """

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.perf_counter() + self.ahead


def ask(sock: zmq.Socket[bytes], *frames: bytes) -> list[bytes]:
    sock.send_multipart(frames)
    assert sock.poll(10_000), "no answer"
    return sock.recv_multipart()


def refusal(frames: Sequence[bytes]) -> HandshakeRefusedError:
    with pytest.raises(HandshakeRefusedError) as refused:
        open_handshake(frames, COMPAT)
    return refused.value


def outcomes(client: HandshakeClient, count: int = 1) -> list[HandshakeOutcome]:
    found: list[HandshakeOutcome] = []
    end = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < end, f"only {len(found)} of {count} outcomes"
        found += client.poll(0.2)
    assert len(found) == count
    return found


def done(client: HandshakeClient) -> HandshakeDone:
    (outcome,) = outcomes(client)
    assert isinstance(outcome, HandshakeDone), outcome
    return outcome


def failure(client: HandshakeClient) -> HandshakeError:
    (outcome,) = outcomes(client)
    assert isinstance(outcome, HandshakeFailed), outcome
    return outcome.error


def both_families(host: str, port: int, **_: object) -> list[Any]:
    """A name server that knows prefill-0 as this machine, IPv6 first."""
    assert host == "prefill-0"
    stream = socket.SOCK_STREAM
    return [
        (socket.AF_INET6, stream, 6, "", ("::1", port, 0, 0)),
        (socket.AF_INET, stream, 6, "", ("127.0.0.1", port)),
    ]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def look_up_threads() -> int:
    return sum(thread.name == "kvnixl-resolve-host" for thread in threading.enumerate())


def close_server(server: HandshakeServer) -> None:
    """``close()`` waits for a second at most; on a busy machine the thread ends a little later."""
    server.close()
    wait_for(lambda: not server.running, "the server's thread ended")


# --- fixtures -----------------------------------------------------------------------------------


@pytest.fixture
def make_server() -> Iterator[Callable[..., HandshakeServer]]:
    servers: list[HandshakeServer] = []

    def make(
        payloads: dict[tuple[int, int], bytes] | None = None, **options: Any
    ) -> HandshakeServer:
        server = HandshakeServer(
            options.pop("host", "127.0.0.1"), options.pop("port", 0), **options
        )
        servers.append(server)
        server.start({(0, 0): payload()} if payloads is None else payloads)
        return server

    yield make
    for server in servers:
        close_server(server)


@pytest.fixture
def server(make_server: Callable[..., HandshakeServer]) -> HandshakeServer:
    return make_server()


@pytest.fixture
def make_client() -> Iterator[Callable[..., HandshakeClient]]:
    with contextlib.ExitStack() as stack:

        def make(compat: CompatibilityCheck = COMPAT, **options: Any) -> HandshakeClient:
            return stack.enter_context(HandshakeClient(compat, **options))

        yield make


@pytest.fixture
def client(make_client: Callable[..., HandshakeClient]) -> HandshakeClient:
    return make_client(timeout=20.0)


@pytest.fixture
def raw_socket() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Raw ZeroMQ sockets, connected to a server."""
    context = zmq.Context()
    sockets = []

    def connect(kind: int, server: HandshakeServer, **options: Any) -> zmq.Socket[bytes]:
        sock: zmq.Socket[bytes] = context.socket(kind)
        sockets.append(sock)
        for name, value in options.items():
            sock.set(getattr(zmq.SocketOption, name), value)
        sock.connect(f"tcp://127.0.0.1:{server.port}")
        return sock

    yield connect
    context.destroy(linger=0)


class Router:
    """A peer whose answers a test scripts: question -> frames after the delimiter, or silence."""

    def __init__(self, answer: Callable[[GetMeta], Sequence[bytes] | None]) -> None:
        self.questions: list[GetMeta] = []
        self.answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._socket.poll(20):
                continue
            identity, _, question = self._socket.recv_multipart()
            word, pp_rank, tp_rank = msgspec.msgpack.decode(question)
            assert word == b"get_meta_msg"
            self.questions.append(GetMeta(pp_rank, tp_rank))
            frames = self.answer(self.questions[-1])
            if frames is not None:
                self._socket.send_multipart([identity, *frames])
        self._context.destroy(linger=0)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def make_router() -> Iterator[Callable[[Callable[[GetMeta], Sequence[bytes] | None]], Router]]:
    with contextlib.ExitStack() as stack:

        def make(answer: Callable[[GetMeta], Sequence[bytes] | None]) -> Router:
            return stack.enter_context(contextlib.closing(Router(answer)))

        yield make


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port that accepts connections in the kernel and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@pytest.fixture
def full_listener() -> Iterator[socket.socket]:
    """A port on which a connection never comes about: its queue is full, packets are dropped."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(sock.getsockname())
        yield sock


# --- the server: what it serves -----------------------------------------------------------------


def test_it_answers_each_rank_with_its_payload_and_its_clock(
    make_server: Callable[..., HandshakeServer], raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    ranks = {(pp, tp): b"payload %d %d" % (pp, tp) for pp in range(2) for tp in range(3)}
    server = make_server(ranks, clock=lambda: 1e6 + 0.5)
    sock = raw_socket(zmq.REQ, server)
    for (pp, tp), expected in ranks.items():
        frames = ask(sock, encode_get_meta(pp, tp))
        assert frames[0] == expected
        assert [decode_clock(frame) for frame in frames[1:]] == [1e6 + 0.5]
    assert server.counters.as_dict() == {
        "replies": 6,
        "bad_envelopes": 0,
        "overlong_messages": 0,
        "bad_requests": 0,
        "unknown_ranks": 0,
        "not_ready": 0,
        "undeliverable": 0,
        "denied_clients": 0,
        "internal_errors": 0,
    }


def test_peers_can_connect_as_soon_as_start_returns(
    make_server: Callable[..., HandshakeServer],
) -> None:
    for _ in range(20):
        server = make_server()
        socket.create_connection(("127.0.0.1", server.port), timeout=5).close()


def test_changed_metadata_is_served_at_once_and_never_mixed(
    make_server: Callable[..., HandshakeServer], raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    versions = [{(0, rank): b"version %d" % n * 5_000 for rank in range(2)} for n in range(2)]
    server = make_server(versions[0])
    stop = threading.Event()

    def publish() -> None:
        while not stop.is_set():
            for version in versions:
                server.publish(version)

    publisher = threading.Thread(target=publish)
    publisher.start()
    try:
        sock = raw_socket(zmq.REQ, server)
        seen = {ask(sock, encode_get_meta(0, n % 2))[0] for n in range(500)}
    finally:
        stop.set()
        publisher.join(10)
    assert seen <= {version[0, 0] for version in versions}

    server.publish({(0, 0): b"the last one"})
    assert ask(sock, encode_get_meta(0, 0))[0] == b"the last one"
    assert refusal(ask(sock, encode_get_meta(0, 1))).code == "unknown_rank"


# --- the server: what it must survive -----------------------------------------------------------

BAD_QUESTIONS = {
    "no bytes": b"",
    "not msgpack": b"\xc1\xff\x00 hello",
    "text": b"get_meta_msg",
    "cut off": encode_get_meta(0, 0)[:-1],
    "trailing bytes": encode_get_meta(0, 0) + b"\x00",
    "two elements": msgspec.msgpack.encode((b"get_meta_msg", 0)),
    "four elements": msgspec.msgpack.encode((b"get_meta_msg", 0, 0, 0)),
    "no elements": msgspec.msgpack.encode(()),
    "a map": msgspec.msgpack.encode({"get_meta_msg": 0}),
    "unknown message": msgspec.msgpack.encode((b"set_meta_msg", 0, 0)),
    "message as text": msgspec.msgpack.encode(("get_meta_msg", 0, 0)),
    "negative rank": msgspec.msgpack.encode((b"get_meta_msg", 0, -1)),
    "huge rank": msgspec.msgpack.encode((b"get_meta_msg", 2**63, 0)),
    "fractional rank": msgspec.msgpack.encode((b"get_meta_msg", 0.5, 0)),
    "rank of nil": msgspec.msgpack.encode((b"get_meta_msg", None, 0)),
    "list of 2**32 - 1 announced": b"\xdd\xff\xff\xff\xff",
    "nested a thousand deep": b"\x91" * 1000,
    "non-UTF-8 text": b"\x93\xa2\xff\xfe\x00\x00",
    "64 KiB": bytes(64 * 1024),
}


@pytest.mark.parametrize("question", BAD_QUESTIONS.values(), ids=BAD_QUESTIONS.keys())
def test_a_question_that_cannot_be_read_is_refused_and_the_next_peer_is_served(
    server: HandshakeServer, raw_socket: Callable[..., zmq.Socket[bytes]], question: bytes
) -> None:
    assert refusal(ask(raw_socket(zmq.REQ, server), question)).code == "bad_request"
    assert server.counters.bad_requests == 1
    assert ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))[0] == payload()


@pytest.mark.parametrize(
    "extra", [[b""], [encode_get_meta(0, 0)], [b"x"] * 1_000], ids=["one", "a question", "many"]
)
def test_a_question_with_further_frames_is_refused(
    server: HandshakeServer, raw_socket: Callable[..., zmq.Socket[bytes]], extra: list[bytes]
) -> None:
    sock = raw_socket(zmq.REQ, server)
    assert refusal(ask(sock, encode_get_meta(0, 0), *extra)).code == "bad_request"
    assert ask(sock, encode_get_meta(0, 0))[0] == payload()


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [encode_get_meta(0, 0)],
        [b"x", encode_get_meta(0, 0)],
        [b"x"] * 1_000,
    ],
    ids=["an empty frame", "no delimiter", "delimiter not empty", "a thousand frames"],
)
def test_a_message_without_an_envelope_is_ignored_and_the_next_peer_is_served(
    server: HandshakeServer, raw_socket: Callable[..., zmq.Socket[bytes]], frames: list[bytes]
) -> None:
    stranger = raw_socket(zmq.DEALER, server)
    stranger.send_multipart(frames)
    wait_for(lambda: server.counters.bad_envelopes == 1, "the message is counted")
    # The same connection works once it asks properly, and this is its first answer.
    assert ask(stranger, b"", encode_get_meta(0, 0))[1] == payload()
    assert ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))[0] == payload()


def endless_message(stranger: socket.socket, frames: int) -> None:
    """One message of so many empty frames; the last one is sent too."""
    stranger.sendall(b"\x01\x00" * (frames - 1) + b"\x00\x00")


def test_a_message_of_a_million_frames_delays_nobody(
    server: HandshakeServer,
    make_client: Callable[..., HandshakeClient],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = make_client(timeout=20.0)
    client.start("P", "127.0.0.1", server.port)
    done(client)
    read = 0
    real = handshake._receive

    def counting(*args: Any, **options: Any) -> Any:
        nonlocal read
        frames, total = real(*args, **options)
        read = max(read, total)
        return frames, total

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(handshake, "_receive", counting)
        for count in (1, 2, 3):
            with zmtp_connection(server) as stranger:
                endless_message(stranger, 1_000_000)
                wait_for(lambda: server.counters.overlong_messages == count, "it is counted")  # noqa: B023
                client.start("P", "127.0.0.1", server.port)
                done(client)
    assert read <= handshake._MAX_MESSAGE_FRAMES + 1  # and so the thread sees the stop flag soon
    assert server.counters.internal_errors == server.counters.bad_envelopes == 0
    assert "sent a message of more than 1024 frames" in caplog.text
    close_server(server)


def test_the_connection_survives_the_longest_message_that_is_read_to_its_end(
    server: HandshakeServer, raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    stranger = raw_socket(zmq.DEALER, server)
    # The ROUTER puts the identity in front.
    stranger.send_multipart([b"x"] * (handshake._MAX_MESSAGE_FRAMES - 1))
    wait_for(lambda: server.counters.bad_envelopes == 1, "the message is counted")
    assert ask(stranger, b"", encode_get_meta(0, 0))[1] == payload()
    stranger.send_multipart([b"x"] * handshake._MAX_MESSAGE_FRAMES)
    wait_for(lambda: server.counters.overlong_messages == 1, "the message is counted")


def test_a_peer_whose_question_was_lost_with_the_connections_asks_again(
    server: HandshakeServer,
    make_client: Callable[..., HandshakeClient],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = handshake._receive
    questions: list[int] = []

    def first_one_overlong(*args: Any, **options: Any) -> Any:
        frames, total = real(*args, **options)
        if options["most"] > 4:  # the server's
            questions.append(total)
            if len(questions) == 1:
                total = options["most"]
        return frames, total

    monkeypatch.setattr(handshake, "_receive", first_one_overlong)
    client = make_client(timeout=6.0)
    client.start("P", "127.0.0.1", server.port)
    done(client)
    assert len(questions) == 2
    assert server.counters.overlong_messages == 1


def test_closing_connections_leaves_no_descriptor_and_keeps_the_port(
    server: HandshakeServer, client: HandshakeClient
) -> None:
    def attack(times: int) -> None:
        for _ in range(times):
            before = server.counters.overlong_messages
            while server.counters.overlong_messages == before:
                # The socket that is just being closed may still take the next connection.
                with contextlib.suppress(ConnectionError), zmtp_connection(server) as stranger:
                    endless_message(stranger, 2_000)
                    while stranger.recv(4096):
                        pass
            assert server.counters.overlong_messages == before + 1

    attack(1)
    client.start("P", "127.0.0.1", server.port)
    done(client)
    descriptors = open_descriptors()
    attack(10)
    wait_for(lambda: open_descriptors() <= descriptors + 2, "the descriptors are closed")
    with pytest.raises(SideChannelBindError, match="in use"):
        HandshakeServer("127.0.0.1", server.port).start()


def test_a_socket_that_cannot_be_replaced_at_once_is_replaced_later(
    server: HandshakeServer, client: HandshakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = server._open_router
    failures = iter([OSError(errno.EMFILE, "Too many open files")] * 2)

    def flaky(*args: Any) -> Any:
        error = next(failures, None)
        if error is not None:
            raise error
        return real(*args)

    monkeypatch.setattr(server, "_open_router", flaky)
    with zmtp_connection(server) as stranger:
        endless_message(stranger, 2_000)
        wait_for(lambda: server.counters.internal_errors == 2, "it failed twice")
    client.start("P", "127.0.0.1", server.port)
    done(client)


def test_an_unknown_rank_is_refused_by_name(
    make_server: Callable[..., HandshakeServer], raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    server = make_server({(0, 0): payload(), (1, 0): payload()})
    sock = raw_socket(zmq.REQ, server)
    refused = refusal(ask(sock, encode_get_meta(0, 7)))
    assert refused.code == "unknown_rank"
    assert "tensor rank 7; there are 2 x 1" in refused.reason
    assert server.counters.unknown_ranks == 1
    assert ask(sock, encode_get_meta(1, 0))[0] == payload()


TCP_GARBAGE = {
    "nothing": b"",
    "http": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": bytes.fromhex("16030100c8010000c40303") + bytes(200),
    "zeros": bytes(10_000),
    "ones": b"\xff" * 10_000,
    "half a greeting": GREETING[:20],
    "greeting without handshake": GREETING,
    "greeting of version 9": GREETING[:10] + b"\x09" + GREETING[11:],
    "greeting that asks for CURVE": GREETING.replace(b"NULL\0", b"CURVE"),
    "garbage after the greeting": GREETING + b"\x04\xff" * 500,
    "frames before READY": GREETING + b"\x00\x05hello",
    "a frame of 2**63 bytes": GREETING + b"\x02\x80" + bytes(7) + bytes(1000),
    "random": random.Random(7).randbytes(50_000),
}


@pytest.mark.parametrize("data", TCP_GARBAGE.values(), ids=TCP_GARBAGE.keys())
@pytest.mark.parametrize("hang_up", [True, False], ids=["hangs up", "stays"])
def test_a_stranger_on_the_port_disturbs_nobody(
    server: HandshakeServer,
    raw_socket: Callable[..., zmq.Socket[bytes]],
    data: bytes,
    hang_up: bool,
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(data)
        if hang_up:
            stranger.close()
        assert ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))[0] == payload()
    assert server.running
    assert server.counters.internal_errors == 0


def zmtp_connection(server: HandshakeServer, kind: bytes = b"DEALER") -> socket.socket:
    """A raw connection that has done ZeroMQ's handshake."""
    stranger = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
    stranger.sendall(GREETING + b"\x04" + bytes([len(ready)]) + ready)
    received = b""
    while b"Socket-Type" not in received:
        data = stranger.recv(4096)
        if not data:
            stranger.close()
            raise ConnectionResetError("the server closed the connection")
        received += data
    return stranger


def test_a_frame_of_100_megabytes_is_cut_off_before_it_arrives(
    server: HandshakeServer, raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    size = 100 << 20
    before = resident_bytes()
    sent = 0
    with zmtp_connection(server) as stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(b"\x01\x00" + b"\x02" + size.to_bytes(8, "big"))
        while sent < size:
            sent += stranger.send(bytes(1 << 20))
    assert sent < size // 2  # the rest of it met a closed connection
    assert resident_bytes() - before < size // 2
    assert ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))[0] == payload()
    assert server.counters.bad_requests == server.counters.bad_envelopes == 0


def test_frames_over_64_kib_end_the_connection(
    server: HandshakeServer, raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    sock = raw_socket(zmq.REQ, server)
    monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    try:
        sock.send(bytes(64 * 1024 + 1))
        assert monitor.poll(10_000), "the connection stands"
    finally:
        sock.disable_monitor()
        monitor.close(linger=0)
    assert server.counters.bad_requests == 0
    assert ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))[0] == payload()


def test_a_client_that_never_reads_blocks_nobody_and_costs_no_memory(
    make_server: Callable[..., HandshakeServer], raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    big = bytes(1 << 20)
    server = make_server({(0, 0): big})
    before = resident_bytes()
    greedy = raw_socket(zmq.DEALER, server, RCVHWM=1, SNDHWM=0, RCVBUF=4096)
    for _ in range(1_000):
        greedy.send_multipart([b"", encode_get_meta(0, 0)])
    wait_for(lambda: server.counters.undeliverable > 0, "an answer cannot be delivered")
    assert ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))[0] == big
    wait_for(lambda: server.counters.replies == 1_001, "all questions are taken")
    assert resident_bytes() - before < 200 << 20  # of 1 GB of answers
    assert server.counters.internal_errors == 0


def test_a_client_that_leaves_before_the_answer_is_counted(
    make_server: Callable[..., HandshakeServer],
) -> None:
    asked, gone = threading.Event(), threading.Event()

    def clock() -> float:
        asked.set()
        gone.wait(10)
        return 0.0

    server = make_server(clock=clock)
    question = encode_get_meta(0, 0)
    before = open_descriptors()
    with zmtp_connection(server) as stranger:
        stranger.sendall(b"\x01\x00\x00" + bytes([len(question)]) + question)
        assert asked.wait(10)
    wait_for(lambda: open_descriptors() <= before, "the server's end is closed too")
    gone.set()
    wait_for(lambda: server.counters.undeliverable == 1, "the lost answer is counted")
    assert server.counters.internal_errors == 0


def test_an_unexpected_error_is_counted_and_the_next_question_answered(
    make_server: Callable[..., HandshakeServer],
    raw_socket: Callable[..., zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    clocks = iter([lambda: 1 / 0])

    def clock() -> float:
        return next(clocks, lambda: 7.0)()

    server = make_server(clock=clock)
    raw_socket(zmq.REQ, server).send(encode_get_meta(0, 0))
    wait_for(lambda: server.counters.internal_errors == 1, "the error is counted")
    assert ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))[0] == payload()
    assert "unexpected error" in caplog.text


@pytest.fixture(scope="module")
def fuzzed_server() -> Iterator[HandshakeServer]:
    with HandshakeServer("127.0.0.1", 0) as server:
        server.start({(0, 0): payload()})
        yield server
        assert server.running
        assert server.counters.internal_errors == 0


FRAMES = st.lists(
    st.one_of(
        st.just(b""),
        st.binary(max_size=200),
        st.just(encode_get_meta(0, 0)),
        st.builds(
            msgspec.msgpack.encode,
            st.recursive(
                st.none()
                | st.integers(-(2**63), 2**64 - 1)
                | st.binary()
                | st.text()
                | st.floats(),
                lambda inner: st.lists(inner, max_size=5),
                max_leaves=6,
            ),
        ),
    ),
    min_size=1,
    max_size=6,
)


@settings(deadline=None, max_examples=300)
@given(messages=st.lists(FRAMES, min_size=1, max_size=5))
def test_no_frames_whatever_their_bytes_end_the_service(
    fuzzed_server: HandshakeServer, messages: list[list[bytes]]
) -> None:
    context = zmq.Context.instance()
    with context.socket(zmq.DEALER) as stranger, context.socket(zmq.REQ) as peer:
        for sock in (stranger, peer):
            sock.linger = 0
            sock.connect(f"tcp://127.0.0.1:{fuzzed_server.port}")
        for frames in messages:
            stranger.send_multipart(frames)
        # Its own question comes last, so when it is answered all before it was taken.
        stranger.send_multipart([b"", encode_get_meta(0, 0)])
        while True:
            assert stranger.poll(10_000), "the server is silent"
            answer = stranger.recv_multipart()
            if len(answer) == 3:
                assert answer[1] == payload()
                break
            assert refusal(answer[1:])
        assert ask(peer, encode_get_meta(0, 0))[0] == payload()


def test_a_flood_of_bad_questions_gives_one_log_line(
    server: HandshakeServer,
    raw_socket: Callable[..., zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    sock = raw_socket(zmq.REQ, server)
    for _ in range(200):
        ask(sock, b"?")
    lines = [record for record in caplog.records if "Refused a question" in record.message]
    assert len(lines) == 1
    assert "127.0.0.1" in lines[0].message
    assert server.counters.bad_requests == 200


# --- the server: starting and stopping ----------------------------------------------------------


def test_a_port_in_use_fails_at_start_up_and_names_the_option(server: HandshakeServer) -> None:
    threads = threading.active_count()
    second = HandshakeServer("127.0.0.1", server.port, port_option="kv_side_channel_port")
    with pytest.raises(SideChannelBindError) as refused:
        second.start({(0, 0): payload()})
    message = str(refused.value)
    assert f"'127.0.0.1' port {server.port}" in message
    assert "in use, by another engine" in message
    assert "kv_side_channel_port" in message
    assert "VLLM_" not in message
    assert (refused.value.host, refused.value.port) == ("127.0.0.1", server.port)
    assert not second.running
    assert threading.active_count() <= threads
    second.close()


def test_an_address_of_another_machine_cannot_be_bound() -> None:
    server = HandshakeServer("192.0.2.1", 0, host_option="kv_side_channel_host")
    with pytest.raises(SideChannelBindError, match=r"no address of this machine.*kv_side_channel_"):
        server.start()


def test_a_name_that_does_not_resolve_cannot_be_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(handshake.socket, "getaddrinfo", resolve)
    server = HandshakeServer("prefill-0", 0)
    with pytest.raises(SideChannelBindError, match=r"does not resolve.*the host argument"):
        server.start()


def test_a_name_is_bound_to_its_ipv4_address_where_stock_peers_look(
    make_server: Callable[..., HandshakeServer],
    raw_socket: Callable[..., zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handshake.socket, "getaddrinfo", both_families)
    server = make_server(host="prefill-0")
    assert ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))[0] == payload()


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=r"65535.*set the port argument"):
        HandshakeServer("127.0.0.1", port)


def test_port_zero_takes_a_free_port_that_can_be_read(
    make_server: Callable[..., HandshakeServer],
) -> None:
    first, second = make_server(), make_server()
    assert 0 < first.port != second.port > 0
    assert first.address == ("127.0.0.1", first.port)


def test_bound_and_advertised_address_are_separate(
    make_server: Callable[..., HandshakeServer], client: HandshakeClient
) -> None:
    server = make_server(host="0.0.0.0", advertised_host="[2001:db8::7]")
    assert server.address == ("2001:db8::7", server.port)
    client.start("P", "127.0.0.1", server.port)
    done(client)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "[::]", "*", "", "::ffff:0.0.0.0", "224.0.0.1", "255.255.255.255", "a b",
     "host:5600", "tcp://10.0.0.1", "2605::1:16051::"],
)  # fmt: skip
def test_an_address_that_nobody_can_connect_to_is_not_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match="set advertised_host"):
        check_advertised_host(host, option="advertised_host")
    with pytest.raises(ConfigError, match="set the host argument"):
        check_advertised_host(host)
    with pytest.raises(ConfigError):
        HandshakeServer("127.0.0.1", 0, advertised_host=host)


def test_a_wildcard_needs_an_advertised_host() -> None:
    with pytest.raises(ConfigError, match=r"cannot be advertised.*the host argument"):
        HandshakeServer("0.0.0.0", 0)


@pytest.mark.parametrize(
    ("bound", "advertised", "warning"),
    [
        ("0.0.0.0", "localhost", "from this machine only"),
        ("0.0.0.0", "127.0.0.1", "from this machine only"),
        ("127.0.0.1", "10.1.2.3", "only if something forwards"),
        ("127.0.0.1", "localhost", None),
        ("0.0.0.0", "10.1.2.3", None),
    ],
)
def test_addresses_that_do_not_fit_together_are_warned_about(
    make_server: Callable[..., HandshakeServer],
    caplog: pytest.LogCaptureFixture,
    bound: str,
    advertised: str,
    warning: str | None,
) -> None:
    make_server(host=bound, advertised_host=advertised)
    if warning is None:
        assert not caplog.records
    else:
        assert warning in caplog.text


def test_localhost_is_warned_about_when_a_peer_elsewhere_asks(
    server: HandshakeServer,
    raw_socket: Callable[..., zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sock = raw_socket(zmq.REQ, server)
    ask(sock, encode_get_meta(0, 0))
    assert not caplog.records
    monkeypatch.setattr(handshake, "_peer_of", lambda _: "192.0.2.9")
    for _ in range(3):
        ask(sock, encode_get_meta(0, 0))
    (record,) = caplog.records
    assert "192.0.2.9 asks for metadata" in record.message


def test_a_peer_elsewhere_is_no_news_to_a_server_that_can_be_reached(
    make_server: Callable[..., HandshakeServer],
    raw_socket: Callable[..., zmq.Socket[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(handshake, "_peer_of", lambda _: "192.0.2.9")
    server = make_server(host="0.0.0.0", advertised_host="10.0.0.1")
    ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))
    assert not caplog.records


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
def test_ipv6_works_with_and_without_brackets(
    make_server: Callable[..., HandshakeServer], client: HandshakeClient, host: str
) -> None:
    server = make_server(host=host, advertised_host="::1")
    for name in ("::1", "[::1]"):
        client.start("P", name, server.port)
        done(client)


def test_all_interfaces_serve_both_families(
    make_server: Callable[..., HandshakeServer], client: HandshakeClient
) -> None:
    server = make_server(host="*", advertised_host="10.0.0.1")
    for host in ("127.0.0.1", "::1"):
        client.start("P", host, server.port)
        done(client)


@pytest.mark.parametrize(
    ("host", "port", "endpoint"),
    [
        ("10.0.0.1", 5600, "tcp://10.0.0.1:5600"),
        ("prefill-0.svc", 5600, "tcp://prefill-0.svc:5600"),
        ("::1", 1, "tcp://[::1]:1"),
        ("[2605::1:1605]", 5600, "tcp://[2605::1:1605]:5600"),
        ("fe80::1%eth0", 5600, "tcp://[fe80::1%eth0]:5600"),
    ],
)
def test_endpoints(host: str, port: int, endpoint: str) -> None:
    assert tcp_endpoint(host, port) == endpoint


@pytest.mark.parametrize(
    ("host", "port"),
    [("10.0.0.1;10.0.0.2", 1), ("a/b", 1), ("", 1), ("1:2", 1), ("10.0.0.1", 65_536)],
)
def test_what_is_no_endpoint_is_refused(host: str, port: int) -> None:
    with pytest.raises(ValueError, match=r"neither an IP address nor a host name|not in 0"):
        tcp_endpoint(host, port)


def test_stopping_is_quick_final_and_may_be_repeated(
    make_server: Callable[..., HandshakeServer], raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    server = make_server()
    ask(raw_socket(zmq.REQ, server), encode_get_meta(0, 0))
    greedy = raw_socket(zmq.DEALER, server)
    for _ in range(300):
        greedy.send_multipart([b"", encode_get_meta(0, 0)])
    close_server(server)
    server.close()
    with pytest.raises(ClosedError):
        server.start()
    with pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    # The port is free again at once.
    assert make_server(port=server.port).port == server.port


def test_stopping_does_not_wait_for_the_questions_that_have_come(
    make_server: Callable[..., HandshakeServer], raw_socket: Callable[..., zmq.Socket[bytes]]
) -> None:
    asked, stopping = threading.Event(), threading.Event()

    def clock() -> float:
        asked.set()
        stopping.wait(10)
        return 0.0

    server = make_server(clock=clock)
    greedy = raw_socket(zmq.DEALER, server)
    for _ in range(30):
        greedy.send_multipart([b"", encode_get_meta(0, 0)])
    assert asked.wait(10)  # and the thread is in the middle of its first answer
    closing = threading.Thread(target=server.close)
    closing.start()
    wait_for(lambda: server._stopping, "the server is told to stop")
    stopping.set()
    closing.join(10)
    wait_for(lambda: not server.running, "the server's thread ended")
    assert server.counters.replies == 1


def test_a_server_that_was_never_started_can_be_stopped() -> None:
    server = HandshakeServer("127.0.0.1", 0)
    server.close()
    server.close()


def test_starting_twice_is_refused(server: HandshakeServer) -> None:
    with pytest.raises(KvNixlError, match=r"use publish\(\)"):
        server.start()


def test_servers_leave_no_thread_and_no_descriptor() -> None:
    with HandshakeServer("127.0.0.1", 0) as server:
        server.start({(0, 0): payload()})
    threads, descriptors = threading.active_count(), open_descriptors()
    for _ in range(10):
        with HandshakeServer("127.0.0.1", 0) as server:
            server.start({(0, 0): payload()})
        with HandshakeClient(COMPAT, timeout=0.01) as client:
            client.start("P", "127.0.0.1", server.port)
            client.poll(0.001)
    wait_for(lambda: threading.active_count() <= threads, "the threads ended")
    wait_for(lambda: open_descriptors() <= descriptors, "the descriptors are closed")


# --- the client ---------------------------------------------------------------------------------


def test_a_handshake_with_several_ranks(
    make_server: Callable[..., HandshakeServer], client: HandshakeClient
) -> None:
    ranks = [(pp, tp) for pp in range(2) for tp in range(4)]
    metadata = {rank: agent_metadata(incarnation=100 + index) for index, rank in enumerate(ranks)}
    server = make_server({rank: payload(metadata[rank]) for rank in ranks})
    assert client.poll() == []
    assert client.start("P", "127.0.0.1", server.port, ranks)
    assert len(client) == 1
    outcome = done(client)
    assert outcome.peer == PeerAddress("P", "127.0.0.1", server.port)
    assert {rank: opened.metadata for rank, opened in outcome.ranks.items()} == metadata
    assert len(client) == 0
    assert client.poll() == []
    assert client.outcomes == {"done": 1}


@pytest.mark.parametrize("epoch", [-1e6, 0.0, 1e6])
def test_the_peers_clock_is_estimated_across_epochs_a_million_seconds_apart(
    make_server: Callable[..., HandshakeServer], client: HandshakeClient, epoch: float
) -> None:
    server = make_server(clock=lambda: time.perf_counter() + epoch)
    client.start("P", "127.0.0.1", server.port)
    clock = done(client).clock
    assert clock is not None
    assert abs(clock.offset - epoch) <= clock.round_trip / 2 + 1e-6


def test_the_clock_offset_comes_from_the_best_round_trip(
    make_router: Callable[..., Router], make_client: Callable[..., HandshakeClient]
) -> None:
    now = 50.0
    delays = {0: 0.5, 1: 0.125, 2: 0.25}

    def answer(question: GetMeta) -> list[bytes]:
        nonlocal now
        now += delays[question.tp_rank]  # all of it on the way there: the worst asymmetry
        return [b"", *encode_reply(payload(), 1000.0 + now)]

    client = make_client(clock=lambda: now)
    client.start("P", "127.0.0.1", make_router(answer).port, [(0, 0), (0, 1), (0, 2)])
    clock = done(client).clock
    assert clock is not None
    assert clock.round_trip == 0.125
    assert clock.offset == pytest.approx(1000.0 + 0.0625)
    assert clock.local_deadline(1000.0 + 80.0) <= 80.0


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that refuses connections, and stays nobody else's. A server may still bind it."""
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))  # and does not listen
        yield bound.getsockname()[1]


def black_holes(
    make_router: Callable[..., Router],
    listener: socket.socket,
    full_listener: socket.socket,
    questions: list[GetMeta],
) -> dict[str, int]:
    """Ports of peers from which no answer comes; ``questions`` gets what one of them is asked."""
    return {
        "accepts, never greets": listener.getsockname()[1],
        "drops all packets": full_listener.getsockname()[1],
        "takes the question, never answers": make_router(questions.append).port,
    }


def test_black_holes_delay_nobody(
    make_server: Callable[..., HandshakeServer],
    make_client: Callable[..., HandshakeClient],
    make_router: Callable[..., Router],
    listener: socket.socket,
    full_listener: socket.socket,
    closed_port: int,
) -> None:
    server = make_server()
    client = make_client(timeout=60.0)
    holes = black_holes(make_router, listener, full_listener, [])
    holes["refuses"] = closed_port
    for name, port in holes.items():
        client.start(name, "127.0.0.1", port)
    client.poll(0.05)
    unburdened = make_client(timeout=60.0)
    ratios = []
    for _ in range(5):
        seconds = []
        for each, pending in ((unburdened, 0), (client, len(holes))):
            each.start("P", "127.0.0.1", server.port)
            outcome = done(each)
            assert outcome.peer.engine_id == "P"
            assert len(each) == pending  # the holes are all still there
            seconds.append(outcome.seconds)
        ratios.append(seconds[1] / seconds[0])
    assert min(ratios) < 10, ratios  # of several tries, for the machine may be busy


def test_a_peer_that_does_not_answer_fails_at_its_own_deadline(
    make_client: Callable[..., HandshakeClient],
    make_router: Callable[..., Router],
    listener: socket.socket,
    full_listener: socket.socket,
) -> None:
    clock = Clock()
    client = make_client(timeout=30.0, clock=clock)
    questions: list[GetMeta] = []
    holes = black_holes(make_router, listener, full_listener, questions)
    for name, port in holes.items():
        client.start(name, "127.0.0.1", port)
    client.start("patient", "127.0.0.1", listener.getsockname()[1], timeout=600.0)
    for attempt in (1, 2):
        wait_for(lambda: client.poll() == [] and len(questions) == attempt, "one is asked")  # noqa: B023
        clock.ahead += 10.0
    clock.ahead += 9.5
    for outcome in outcomes(client, len(holes)):
        assert isinstance(outcome, HandshakeFailed)
        assert isinstance(outcome.error, HandshakeTimeoutError)
        assert outcome.seconds >= 30.0
        name = outcome.peer.engine_id
        assert outcome.error.connected == (name == "takes the question, never answers")
        assert f"127.0.0.1:{holes[name]} within 30 s" in str(outcome.error)
    assert len(client) == 1
    assert client.outcomes == {"HandshakeTimeoutError": len(holes)}


def test_a_port_that_refuses_says_so_before_the_deadline(
    make_client: Callable[..., HandshakeClient], closed_port: int
) -> None:
    client = make_client(timeout=6.0)
    client.start("P", "127.0.0.1", closed_port)
    (outcome,) = outcomes(client)
    assert isinstance(outcome, HandshakeFailed)
    assert isinstance(outcome.error, HandshakeConnectError)
    assert "Connection refused" in str(outcome.error)
    assert f"127.0.0.1:{closed_port}" in str(outcome.error)
    # A peer that is just starting has the time of the first attempt to open its port.
    assert outcome.seconds >= 6.0 / 3


def test_a_connection_that_fails_at_once_on_this_machine_says_so(
    make_client: Callable[..., HandshakeClient],
    monkeypatch: pytest.MonkeyPatch,
    closed_port: int,
) -> None:
    class NoRoute(socket.socket):
        def connect_ex(self, address: object) -> int:
            return errno.EHOSTUNREACH

    monkeypatch.setattr(handshake.socket, "socket", NoRoute)
    clock = Clock()
    client = make_client(timeout=30.0, clock=clock)
    client.start("P", "127.0.0.1", closed_port)
    assert client.poll() == []
    clock.ahead += 10.0  # the second attempt begins, which looks for a reason
    error = failure(client)
    assert isinstance(error, HandshakeConnectError)
    assert error.reason == "No route to host"


def test_looking_whether_a_peer_refuses_leaves_nothing_behind(
    make_client: Callable[..., HandshakeClient],
    full_listener: socket.socket,
    listener: socket.socket,
    closed_port: int,
) -> None:
    client = make_client(timeout=0.3)
    ports = [full_listener.getsockname()[1], listener.getsockname()[1], closed_port]
    for port in ports:
        client.start("P", "127.0.0.1", port)
    outcomes(client, len(ports))
    assert not client._by_probe
    descriptors = open_descriptors()
    for port in ports:
        client.start("P", "127.0.0.1", port)
    outcomes(client, len(ports))
    wait_for(lambda: open_descriptors() <= descriptors, "the descriptors are closed")


def test_a_name_server_that_does_not_answer_delays_nobody(
    server: HandshakeServer, make_client: Callable[..., HandshakeClient]
) -> None:
    release = threading.Event()

    def resolve(host: str, port: int, **_: object) -> list[Any]:
        assert host == "prefill-7"
        assert release.wait(30)
        return []

    clock = Clock()
    client = make_client(resolve=resolve, clock=clock, timeout=20.0)
    try:
        client.start("slow", "prefill-7", 5600, timeout=40.0)
        client.start("P", "127.0.0.1", server.port)
        assert done(client).peer.engine_id == "P"
        clock.ahead += 40.0
        error = failure(client)
    finally:
        release.set()
    wait_for(lambda: look_up_threads() == 0, "the look-up ended")
    assert isinstance(error, HostResolutionError)
    assert "prefill-7" in str(error)


def test_look_ups_that_hang_are_bounded_and_do_not_hold_addresses_up(
    server: HandshakeServer, make_client: Callable[..., HandshakeClient]
) -> None:
    release = threading.Event()
    asked: list[str] = []

    def resolve(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        assert release.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    client = make_client(resolve=resolve, max_concurrent=3, timeout=0.2)
    try:
        for n in range(50):
            client.start(f"E{n}", f"slow-{n}", server.port)
        errors = [outcome.error for outcome in outcomes(client, 50)]  # type: ignore[union-attr]
        assert all(isinstance(error, HostResolutionError) for error in errors)
        assert "3 other names were being looked up" in str(errors[-1])
        assert look_up_threads() == 3
        wait_for(lambda: len(asked) == 3, "all three look up")
        client.start("P", "127.0.0.1", server.port, timeout=20.0)
        done(client)
    finally:
        release.set()
    wait_for(lambda: look_up_threads() == 0, "the look-ups ended")
    client.start("P", "prefill-9", server.port, timeout=20.0)
    done(client)


def test_one_look_up_serves_all_that_wait_for_the_name_and_none_that_come_later(
    server: HandshakeServer,
    make_server: Callable[..., HandshakeServer],
    make_client: Callable[..., HandshakeClient],
) -> None:
    release = threading.Event()
    asked: list[str] = []

    def resolve(host: str, port: int, **_: object) -> list[Any]:
        asked.append(host)
        assert release.wait(30)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    client = make_client(resolve=resolve, timeout=20.0)
    client.start("P", "prefill-0", server.port)
    client.start("P", "prefill-0", make_server().port)
    release.set()
    outcomes(client, 2)
    assert asked == ["prefill-0"]
    client.start("P", "prefill-0", server.port)
    wait_for(lambda: client._look_ups["prefill-0"].over, "the second look-up is over")
    client.start("P", "prefill-0", make_server().port)
    outcomes(client, 2)
    assert len(asked) == 3


def test_a_process_without_threads_to_spare_fails_the_look_up(
    make_client: Callable[..., HandshakeClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    client = make_client()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_more)
        assert client.start("P", "prefill-0", 5600)
    error = failure(client)
    assert isinstance(error, HostResolutionError)
    assert "can't start new thread" in str(error)
    assert len(client) == 0


@pytest.fixture
def exhaust_descriptors() -> Iterator[Callable[[int], contextlib.AbstractContextManager[None]]]:
    """Leave the process so many descriptors and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    @contextlib.contextmanager
    def exhaust(spare: int) -> Iterator[None]:
        held: list[int] = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 64, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            for _ in range(spare):
                os.close(held.pop())
            yield
        finally:
            for descriptor in held:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    yield exhaust
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("spare", range(12))
@pytest.mark.parametrize("in_use", [False, True], ids=["first use", "in use"])
def test_without_descriptors_the_peer_fails_with_a_clear_reason_and_the_next_one_is_met(
    server: HandshakeServer,
    make_client: Callable[..., HandshakeClient],
    exhaust_descriptors: Callable[[int], contextlib.AbstractContextManager[None]],
    in_use: bool,
    spare: int,
) -> None:
    client = make_client(timeout=20.0)
    if in_use:
        client.start("P", "127.0.0.1", server.port)
        done(client)
    with exhaust_descriptors(spare):
        client.start("P", "127.0.0.1", server.port)
        (outcome,) = outcomes(client)
    if isinstance(outcome, HandshakeFailed):
        assert "Too many open files" in str(outcome.error)
        assert "engine 'P' at 127.0.0.1" in str(outcome.error)
    # How many it takes differs a little: a connection that closes gives some back. That of the
    # first handshake has a descriptor at each end and one for its socket.
    fewest = 5 if in_use else 6
    if not fewest <= spare <= 10:
        assert isinstance(outcome, HandshakeDone if spare > 10 else HandshakeFailed)
    client.start("P", "127.0.0.1", server.port)
    done(client)


def test_a_poller_that_fails_ends_the_handshakes_not_the_poll(
    client: HandshakeClient,
    server: HandshakeServer,
    listener: socket.socket,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.start("P", "127.0.0.1", listener.getsockname()[1])
    client.poll()

    def fail(*_: object) -> None:
        raise zmq.ZMQError(errno.EMFILE)

    with monkeypatch.context() as patch:
        patch.setattr(client._poller, "poll", fail)
        assert "Too many open files" in str(failure(client))
    client.start("P", "127.0.0.1", server.port)
    done(client)


def test_a_handshake_asks_a_bounded_number_of_ranks(client: HandshakeClient) -> None:
    drawn = 0

    def ranks() -> Iterator[tuple[int, int]]:
        nonlocal drawn
        for rank in range(2**20):
            drawn += 1
            yield 0, rank

    with pytest.raises(ValueError, match="at most 4096 ranks"):
        client.start("P", "127.0.0.1", 5600, ranks())
    assert drawn == handshake.MAX_RANKS + 1
    assert len(client) == 0
    assert client.start("P", "127.0.0.1", 5600, [(0, n) for n in range(handshake.MAX_RANKS)])


def test_a_lost_answer_is_asked_for_once_more(
    make_router: Callable[..., Router], make_client: Callable[..., HandshakeClient]
) -> None:
    answers = iter([None, [b"", *encode_reply(payload(), 1.0)]])
    router = make_router(lambda _: next(answers))
    clock = Clock()
    client = make_client(timeout=30.0, clock=clock)
    client.start("P", "127.0.0.1", router.port)
    wait_for(lambda: client.poll() == [] and router.questions, "it is asked")
    clock.ahead += 10.0
    done(client)
    assert len(router.questions) == 2


def test_there_is_one_retry_and_ranks_that_answered_are_not_asked_again(
    make_router: Callable[..., Router], make_client: Callable[..., HandshakeClient]
) -> None:
    router = make_router(
        lambda question: None if question.tp_rank else [b"", *encode_reply(payload(), 1.0)]
    )
    clock = Clock()
    client = make_client(timeout=30.0, clock=clock)
    client.start("P", "127.0.0.1", router.port, [(0, 0), (0, 1)])
    for count in (2, 3):
        wait_for(lambda: client.poll() == [] and len(router.questions) == count, "it is asked")  # noqa: B023
        clock.ahead += 10.0
    clock.ahead += 9.5
    error = failure(client)
    assert isinstance(error, HandshakeTimeoutError)
    assert router.questions == [(0, 0), (0, 1), (0, 1)]


def test_a_peer_that_starts_late_is_found(
    make_server: Callable[..., HandshakeServer],
    make_client: Callable[..., HandshakeClient],
    closed_port: int,
) -> None:
    client = make_client(timeout=20.0)
    client.start("P", "127.0.0.1", closed_port)
    assert client.poll(0.2) == []
    server = make_server({}, port=closed_port)
    wait_for(lambda: client.poll() == [] and server.counters.not_ready > 1, "it was asked twice")
    server.publish({(0, 0): payload()})
    assert done(client).ranks[0, 0].metadata == agent_metadata()


def test_one_call_waits_for_a_peer_that_is_about_to_get_ready(
    make_server: Callable[..., HandshakeServer], client: HandshakeClient
) -> None:
    server = make_server({})

    def publish() -> None:
        wait_for(lambda: server.counters.not_ready > 1, "it was asked twice")
        server.publish({(0, 0): payload()})

    publisher = threading.Thread(target=publish)
    publisher.start()
    client.start("P", "127.0.0.1", server.port)
    (outcome,) = client.poll(30.0)
    publisher.join(10)
    assert isinstance(outcome, HandshakeDone)


def test_a_peer_that_never_gets_ready_says_so(
    make_server: Callable[..., HandshakeServer], make_client: Callable[..., HandshakeClient]
) -> None:
    clock = Clock()
    client = make_client(timeout=30.0, clock=clock)
    server = make_server({})
    client.start("P", "127.0.0.1", server.port)
    wait_for(lambda: client.poll() == [] and server.counters.not_ready > 1, "it was asked twice")
    clock.ahead += 30.0
    error = failure(client)
    assert isinstance(error, HandshakeRefusedError)
    assert error.code == "not_ready"


def test_an_unknown_rank_fails_the_handshake_at_once(
    server: HandshakeServer, client: HandshakeClient
) -> None:
    client.start("P", "127.0.0.1", server.port, [(0, 0), (3, 0)])
    error = failure(client)
    assert isinstance(error, HandshakeRefusedError)
    assert error.code == "unknown_rank"
    assert server.counters.unknown_ranks == 1


def test_another_engine_at_that_address(server: HandshakeServer, client: HandshakeClient) -> None:
    client.start("Q", "127.0.0.1", server.port)
    error = failure(client)
    assert isinstance(error, EngineIdMismatchError)
    assert (error.expected, error.actual) == ("Q", "P")


def test_a_restarted_engine_is_told_apart_rank_by_rank(
    make_server: Callable[..., HandshakeServer], client: HandshakeClient
) -> None:
    server = make_server(
        {
            (0, 0): payload(agent_metadata(incarnation=11)),
            (0, 1): payload(agent_metadata(incarnation=12)),
        }
    )
    ranks = [(0, 0), (0, 1)]
    client.start("P", "127.0.0.1", server.port, ranks, incarnations={(0, 0): 11, (0, 1): 12})
    done(client)
    client.start("P", "127.0.0.1", server.port, ranks, incarnations={(0, 1): 99})
    error = failure(client)
    assert isinstance(error, IncarnationChangedError)
    assert (error.engine_id, error.expected, error.actual) == ("P", 99, 12)


def test_engines_with_other_factors_are_refused_with_both_values(
    make_server: Callable[..., HandshakeServer], client: HandshakeClient
) -> None:
    other = CompatibilityCheck({"model": "llama", "dtype": "bfloat16"})
    metadata = agent_metadata(factors=other.factors_text)
    server = make_server({(0, 0): payload(metadata, compat_hash=other.hash)})
    client.start("P", "127.0.0.1", server.port)
    error = failure(client)
    assert isinstance(error, CompatibilityError)
    assert (error.local_hash, error.remote_hash) == (COMPAT.hash, other.hash)
    ((name, local, remote),) = error.differences
    assert (name, local, remote) == ("dtype", "float16", "bfloat16")


def test_the_hash_is_compared_before_the_metadata_is_decoded(
    make_server: Callable[..., HandshakeServer],
    client: HandshakeClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = make_server(
        {
            (0, 0): payload(b"not metadata", compat_hash="0" * 64),
            (0, 1): payload(b"not metadata"),
        }
    )
    client.start("P", "127.0.0.1", server.port, [(0, 0)])
    error = failure(client)
    assert isinstance(error, CompatibilityError)
    assert error.remote_hash == "0" * 64

    client.start("P", "127.0.0.1", server.port, [(0, 1)])
    assert isinstance(failure(client), HandshakeReplyError)

    # Neither is a peer's metadata decoded that would decode.
    server.publish({(0, 0): payload(compat_hash="0" * 64)})
    monkeypatch.setattr("kvnixl.wire.decode_agent_metadata", lambda _: pytest.fail("decoded"))
    client.start("P", "127.0.0.1", server.port, [(0, 0)])
    assert isinstance(failure(client), CompatibilityError)


def test_compatibility_that_is_not_enforced_lets_the_peer_in(
    make_server: Callable[..., HandshakeServer],
    make_client: Callable[..., HandshakeClient],
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server({(0, 0): payload(compat_hash="0" * 64)})
    client = make_client(CompatibilityCheck(COMPAT.factors, enforce=False))
    client.start("P", "127.0.0.1", server.port)
    assert done(client).ranks[0, 0].compatibility_hash == "0" * 64
    assert "not compatible" in caplog.text


BAD_ANSWERS = {
    "one empty frame": [b"", b""],
    "one frame of garbage": [b"", b"\xc1"],
    "no delimiter": [payload(), encode_clock(1.0)],
    "delimiter only": [b""],
    "three frames": [b"", payload(), encode_clock(1.0), b""],
    "ten thousand frames": [b""] * 10_000,
    "payload is garbage": [b"", b"\xff\x00", encode_clock(1.0)],
    "payload is empty": [b"", b"", encode_clock(1.0)],
    "payload of another type": [b"", msgspec.msgpack.encode([1, 2]), encode_clock(1.0)],
    "clock is NaN": [b"", payload(), msgspec.msgpack.encode(math.nan)],
    "clock is text": [b"", payload(), msgspec.msgpack.encode("noon")],
    "clock is empty": [b"", payload(), b""],
    "metadata is garbage": [b"", payload(b"\x00"), encode_clock(1.0)],
    "metadata is inconsistent": [
        b"",
        payload(
            msgspec.msgpack.encode(
                {**msgspec.to_builtins(agent_metadata(), builtin_types=(bytes,)), "block_lens": [1]}
            )
        ),
        encode_clock(1.0),
    ],
}


@pytest.mark.parametrize("answer", BAD_ANSWERS.values(), ids=BAD_ANSWERS.keys())
def test_a_bad_answer_fails_that_handshake_only(
    make_router: Callable[..., Router],
    server: HandshakeServer,
    client: HandshakeClient,
    answer: list[bytes],
) -> None:
    client.start("bad", "127.0.0.1", make_router(lambda _: answer).port)
    client.start("P", "127.0.0.1", server.port)
    by_engine = {outcome.peer.engine_id: outcome for outcome in outcomes(client, 2)}
    assert isinstance(by_engine["P"], HandshakeDone)
    bad = by_engine["bad"]
    assert isinstance(bad, HandshakeFailed)
    assert isinstance(bad.error, HandshakeReplyError)
    assert "engine 'bad' at 127.0.0.1" in str(bad.error)


@settings(deadline=None, max_examples=150)
@given(frames=st.lists(st.binary(max_size=100) | st.just(payload()), min_size=1, max_size=5))
def test_whatever_a_peer_answers_poll_gives_an_outcome(frames: list[bytes]) -> None:
    context = zmq.Context.instance()
    with HandshakeClient(COMPAT) as client, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client.start("P", "127.0.0.1", port)
        while not router.poll(0):
            assert client.poll(0.01) == []
        router.send_multipart([router.recv_multipart()[0], *frames])
        assert isinstance(failure(client), HandshakeError)


def test_an_answer_over_the_limit_is_not_received(
    make_router: Callable[..., Router], make_client: Callable[..., HandshakeClient]
) -> None:
    router = make_router(lambda _: [b"", bytes((16 << 20) + 1), encode_clock(1.0)])
    client = make_client(timeout=1.0)
    client.start("P", "127.0.0.1", router.port)
    assert isinstance(failure(client), HandshakeTimeoutError)


def test_a_peer_that_talks_unasked_does_no_harm(
    make_client: Callable[..., HandshakeClient],
) -> None:
    context = zmq.Context()
    talker = context.socket(zmq.DEALER)
    try:
        port = talker.bind_to_random_port("tcp://127.0.0.1")
        client = make_client(timeout=20.0)
        client.start("P", "127.0.0.1", port)
        while not talker.poll(0, zmq.POLLOUT):
            assert client.poll(0.01) == []
        for _ in range(5):
            talker.send_multipart([b"", *encode_reply(payload(), 1.0)])
        # It comes before the question, or it passes for the answer; the others go nowhere.
        (outcome,) = outcomes(client)
        assert isinstance(outcome, HandshakeDone) or isinstance(outcome.error, HandshakeReplyError)
        assert client.poll(0.05) == []
    finally:
        context.destroy(linger=0)


def test_an_unexpected_exception_ends_that_handshake_only(
    server: HandshakeServer,
    client: HandshakeClient,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = handshake.open_handshake

    def explode(*args: Any, **options: Any) -> Any:
        if options["expected_engine_id"] == "bug":
            raise RuntimeError("a bug")
        return real(*args, **options)

    monkeypatch.setattr(handshake, "open_handshake", explode)
    client.start("bug", "127.0.0.1", server.port)
    client.start("P", "127.0.0.1", server.port)
    by_engine = {outcome.peer.engine_id: outcome for outcome in outcomes(client, 2)}
    assert isinstance(by_engine["P"], HandshakeDone)
    assert isinstance(by_engine["bug"], HandshakeFailed)
    assert "a bug" in str(by_engine["bug"].error)
    assert "unexpected error" in caplog.text


def test_one_handshake_at_a_time_per_engine_and_address(
    server: HandshakeServer,
    make_server: Callable[..., HandshakeServer],
    client: HandshakeClient,
) -> None:
    other = make_server()
    assert client.start("P", "127.0.0.1", server.port)
    assert not client.start("P", "127.0.0.1", server.port)
    assert client.start("P", "127.0.0.1", other.port)
    assert len(outcomes(client, 2)) == 2
    assert client.start("P", "127.0.0.1", server.port)
    done(client)
    assert server.counters.replies == 2


def test_a_cancelled_handshake_has_no_outcome(
    make_client: Callable[..., HandshakeClient], listener: socket.socket
) -> None:
    client = make_client(timeout=0.2)
    peer = PeerAddress("P", "127.0.0.1", listener.getsockname()[1])
    client.start(*peer)
    client.poll()
    assert client.cancel(peer)
    assert not client.cancel(peer)
    assert len(client) == 0
    assert client.poll(0.3) == []


def test_more_peers_than_connections_are_all_served(
    make_server: Callable[..., HandshakeServer],
    make_client: Callable[..., HandshakeClient],
    listener: socket.socket,
) -> None:
    server = make_server(host="0.0.0.0", advertised_host="127.0.0.1")
    client = make_client(max_concurrent=2, timeout=20.0)
    client.start("dead", "127.0.0.1", listener.getsockname()[1])
    for octet in range(1, 11):
        client.start("P", f"127.0.0.{octet}", server.port)
    assert {outcome.peer.host for outcome in outcomes(client, 10)} == {
        f"127.0.0.{octet}" for octet in range(1, 11)
    }
    assert len(client) == 1


def test_connections_at_a_time_are_bounded(
    server: HandshakeServer, make_client: Callable[..., HandshakeClient], listener: socket.socket
) -> None:
    client = make_client(max_concurrent=1, timeout=20.0)
    client.start("dead", "127.0.0.1", listener.getsockname()[1], timeout=0.3)
    client.start("P", "127.0.0.1", server.port)
    assert [outcome.peer.engine_id for outcome in outcomes(client, 2)] == ["dead", "P"]


def test_a_failure_at_once_is_delivered_before_the_others_are_waited_for(
    client: HandshakeClient, listener: socket.socket
) -> None:
    client.start("dead", "127.0.0.1", listener.getsockname()[1], timeout=20.0)
    client.start("P", "no host", 5600)
    (outcome,) = client.poll(15.0)
    assert outcome.peer.engine_id == "P"
    (dead,) = client._pending.values()
    assert not dead.retried  # so poll() did not wait for it


def test_what_is_no_peer_fails_through_poll(client: HandshakeClient) -> None:
    for host, port in [("no host", 5600), ("10.0.0.1;x", 5600), ("127.0.0.1", 0), ("::1", 65_536)]:
        assert client.start("P", host, port)
        assert isinstance(failure(client), HostResolutionError)


def test_names_are_looked_up_and_every_address_gets_its_turn(
    server: HandshakeServer, make_client: Callable[..., HandshakeClient]
) -> None:
    clock = Clock()
    client = make_client(resolve=both_families, timeout=30.0, clock=clock)
    client.start("P", "prefill-0", server.port)
    (pending,) = client._pending.values()
    assert done(client).peer.host == "prefill-0"
    assert not pending.retried  # IPv4 comes first, where a stock peer listens

    with HandshakeServer("::1", 0) as ipv6_only:
        ipv6_only.start({(0, 0): payload()})
        client.start("P", "prefill-0", ipv6_only.port)
        (pending,) = client._pending.values()
        wait_for(lambda: client.poll() == [] and pending.socket, "IPv4 is tried")
        clock.ahead += 10.0
        done(client)


@pytest.mark.parametrize("problem", ["no such name", "no address"])
def test_a_name_that_does_not_resolve(
    make_client: Callable[..., HandshakeClient], problem: str
) -> None:
    def resolve(*_: object, **__: object) -> list[Any]:
        if problem == "no address":
            return []
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    client = make_client(resolve=resolve)
    client.start("P", "prefill-0", 5600)
    error = failure(client)
    assert isinstance(error, HostResolutionError)
    assert "'prefill-0'" in str(error)


def test_the_client_checks_its_arguments() -> None:
    for options in (
        {"timeout": 0.0},
        {"timeout": math.nan},
        {"timeout": math.inf},
        {"max_concurrent": 0},
    ):
        with pytest.raises(ConfigError):
            HandshakeClient(COMPAT, **options)  # type: ignore[arg-type]
    client = HandshakeClient(COMPAT)
    with pytest.raises(ValueError, match="at least one rank"):
        client.start("P", "127.0.0.1", 5600, [])
    with pytest.raises(ValueError, match="rank -1"):
        client.start("P", "127.0.0.1", 5600, [(0, -1)])
    for timeout in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="timeout"):
            client.start("P", "127.0.0.1", 5600, timeout=timeout)
    client.close()
    client.close()
    for call in (client.poll, lambda: client.start("P", "127.0.0.1", 5600)):
        with pytest.raises(ClosedError):
            call()


def test_closing_gives_up_what_is_under_way(listener: socket.socket) -> None:
    client = HandshakeClient(COMPAT)
    client.start("P", "127.0.0.1", listener.getsockname()[1])
    client.poll()
    client.close()
    assert len(client) == 0


def test_many_handshakes_leave_nothing_behind(
    server: HandshakeServer, client: HandshakeClient, listener: socket.socket
) -> None:
    client.start("P", "127.0.0.1", server.port)
    done(client)
    descriptors = open_descriptors()
    for _ in range(100):
        client.start("P", "127.0.0.1", server.port)
        client.start("dead", "127.0.0.1", listener.getsockname()[1], timeout=0.005)
        outcomes(client, 2)
    wait_for(lambda: open_descriptors() <= descriptors + 4, "the descriptors are closed")


# --- hosts that a request may name --------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "allowed", "refused"),
    [
        ([], [], ["127.0.0.1", "localhost", "::1"]),
        (["10.0.0.0/8"], ["10.0.0.1", "::ffff:10.9.8.7"], ["11.0.0.1", "::1", "169.254.169.254"]),
        (["10.0.0.7", "fd00::/8"], ["10.0.0.7", "fd00::1", "[fd12::3]"], ["10.0.0.8", "fe80::1"]),
        (["prefill-0.svc"], ["prefill-0.svc", "PREFILL-0.svc."], ["prefill-1.svc", "1.2.3.4"]),
        (["*.prefill.svc"], ["a.prefill.svc", "a.b.prefill.svc"], ["prefill.svc", "xprefill.svc"]),
    ],
)  # fmt: skip
def test_the_allow_list(entries: list[str], allowed: list[str], refused: list[str]) -> None:
    hosts = RemoteAllowList(entries)
    for host in allowed:
        hosts.check(host)
    for host in refused:
        with pytest.raises(RemoteNotAllowedError) as error:
            hosts.check(host)
        assert error.value.host == host
        assert repr(host) in str(error.value)


@pytest.mark.parametrize(
    "entry", ["10.0.0.7/8", "10.0.0.300", "", "a b", "http://x", "10.0.0.0/33", "fd00::/200", "1.2"]
)
def test_an_entry_that_is_no_host_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="allowed remote hosts"):
        RemoteAllowList([entry])


def test_a_text_is_no_list() -> None:
    with pytest.raises(ConfigError, match="expected a list"):
        RemoteAllowList("10.0.0.1")


def test_a_host_outside_the_list_is_never_connected_to(
    server: HandshakeServer,
    make_client: Callable[..., HandshakeClient],
    listener: socket.socket,
) -> None:
    client = make_client(allowed=RemoteAllowList(["10.0.0.0/8"]), timeout=5.0)
    listener.setblocking(False)
    for host in ("127.0.0.1", "::ffff:127.0.0.1"):
        client.start("P", host, listener.getsockname()[1])
        error = failure(client)
        assert isinstance(error, RemoteNotAllowedError)
        assert host in str(error)
    with pytest.raises(BlockingIOError):
        listener.accept()

    open_client = make_client(allowed=RemoteAllowList(["127.0.0.0/8"]))
    open_client.start("P", "127.0.0.1", server.port)
    done(open_client)


def test_a_name_is_allowed_by_what_it_resolves_to_and_looked_up_once(
    server: HandshakeServer, make_client: Callable[..., HandshakeClient]
) -> None:
    answers = {"inside": ["127.0.0.1"], "outside": ["127.0.0.1", "203.0.113.1"]}
    lookups: list[str] = []

    def resolve(host: str, port: int, **_: object) -> list[Any]:
        lookups.append(host)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port))
            for address in answers[host]
        ]

    client = make_client(allowed=RemoteAllowList(["127.0.0.0/8"]), resolve=resolve)
    client.start("P", "inside", server.port)
    done(client)
    client.start("P", "outside", server.port)
    error = failure(client)
    assert isinstance(error, RemoteNotAllowedError)
    assert (error.host, error.address) == ("outside", "203.0.113.1")
    # No second lookup whose answer could differ from the one that was checked.
    assert lookups == ["inside", "outside"]

    by_name = make_client(allowed=RemoteAllowList(["outside"]), resolve=resolve)
    by_name.start("P", "outside", server.port)
    done(by_name)
    by_name.start("P", "inside", server.port)
    assert isinstance(failure(by_name), RemoteNotAllowedError)
    assert lookups == ["inside", "outside", "outside"]


# --- encryption ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Relay:
    """Forwards one TCP connection after the other to a server and keeps what the server says."""

    target: int

    def __post_init__(self) -> None:
        self.from_server = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self._open += [near, far]
                for source, sink, keep in ((near, far, False), (far, near, True)):
                    thread = threading.Thread(
                        target=self._pump, args=(source, sink, keep), daemon=True
                    )
                    self._threads.append(thread)
                    thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, keep: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                if keep:
                    self.from_server += data
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def make_relay() -> Iterator[Callable[[int], Relay]]:
    with contextlib.ExitStack() as stack:
        yield lambda target: stack.enter_context(contextlib.closing(Relay(target)))


@pytest.fixture(scope="module")
def key_pairs() -> dict[str, keys.KeyPair]:
    return {name: keys.generate_key_pair() for name in ("server", "client", "stranger")}


@pytest.fixture
def curve_server(
    make_server: Callable[..., HandshakeServer], key_pairs: dict[str, keys.KeyPair]
) -> HandshakeServer:
    curve = CurveServerKeys(key_pairs["server"], frozenset([key_pairs["client"].public]))
    return make_server(curve=curve)


def test_without_encryption_the_metadata_is_readable_on_the_wire(
    server: HandshakeServer, client: HandshakeClient, make_relay: Callable[[int], Relay]
) -> None:
    """The recorder of the tests below does see what is sent in the clear."""
    relay = make_relay(server.port)
    client.start("P", "127.0.0.1", relay.port)
    done(client)
    assert SECRET in relay.from_server


def test_with_the_keys_the_metadata_arrives_and_nobody_else_can_read_it(
    curve_server: HandshakeServer,
    make_client: Callable[..., HandshakeClient],
    make_relay: Callable[[int], Relay],
    key_pairs: dict[str, keys.KeyPair],
) -> None:
    relay = make_relay(curve_server.port)
    client = make_client(curve=CurveClientKeys(key_pairs["client"], key_pairs["server"].public))
    client.start("P", "127.0.0.1", relay.port)
    assert done(client).ranks[0, 0].metadata == agent_metadata()
    assert len(relay.from_server) > len(payload())
    assert SECRET not in relay.from_server
    assert COMPAT.hash.encode() not in relay.from_server


@pytest.mark.parametrize(
    "stranger",
    ["no keys", "unknown client key", "wrong server key"],
)
def test_without_the_key_no_byte_of_metadata_leaves(
    curve_server: HandshakeServer,
    make_client: Callable[..., HandshakeClient],
    make_relay: Callable[[int], Relay],
    key_pairs: dict[str, keys.KeyPair],
    stranger: str,
) -> None:
    curve = {
        "no keys": None,
        "unknown client key": CurveClientKeys(key_pairs["stranger"], key_pairs["server"].public),
        "wrong server key": CurveClientKeys(key_pairs["client"], key_pairs["stranger"].public),
    }[stranger]
    relay = make_relay(curve_server.port)
    clock = Clock()
    client = make_client(curve=curve, timeout=30.0, clock=clock)
    client.start("P", "127.0.0.1", relay.port)
    wait_for(lambda: client.poll() == [] and relay.from_server, "the server speaks")
    if stranger == "unknown client key":
        wait_for(
            lambda: client.poll() == [] and curve_server.counters.denied_clients > 0,
            "the key is refused",
        )
    clock.ahead += 29.0  # what is left is for the second attempt
    error = failure(client)
    assert isinstance(error, HandshakeTimeoutError)
    assert not error.connected
    assert ("agree on CURVE" in str(error)) == (curve is not None)
    assert relay.from_server  # the server did speak, but
    assert SECRET not in relay.from_server
    assert len(relay.from_server) < 5_000
    assert curve_server.counters.replies == 0

    honest = make_client(curve=CurveClientKeys(key_pairs["client"], key_pairs["server"].public))
    honest.start("P", "127.0.0.1", curve_server.port)
    done(honest)


def test_a_question_without_a_handshake_gets_nothing_from_an_encrypting_server(
    curve_server: HandshakeServer,
) -> None:
    """A raw client that skips the security handshake and sends the question at once."""
    question = encode_get_meta(0, 0)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x03REQ"
    for greeting in (GREETING, GREETING.replace(b"NULL\0", b"CURVE")):
        with socket.create_connection(("127.0.0.1", curve_server.port), timeout=10) as raw:
            received = b""
            with contextlib.suppress(ConnectionError):
                raw.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
                raw.sendall(b"\x01\x00\x00" + bytes([len(question)]) + question)
                while data := raw.recv(4096):
                    received += data
        assert len(received) <= 128  # its greeting, at most an ERROR command
    assert curve_server.counters.as_dict()["replies"] == 0


def test_without_a_list_of_clients_the_servers_key_suffices(
    make_server: Callable[..., HandshakeServer],
    make_client: Callable[..., HandshakeClient],
    key_pairs: dict[str, keys.KeyPair],
) -> None:
    server = make_server(curve=CurveServerKeys(key_pairs["server"]))
    client = make_client(curve=CurveClientKeys(key_pairs["stranger"], key_pairs["server"].public))
    client.start("P", "127.0.0.1", server.port)
    done(client)


def test_an_encrypting_client_tells_a_plain_server_nothing(
    server: HandshakeServer,
    make_client: Callable[..., HandshakeClient],
    key_pairs: dict[str, keys.KeyPair],
) -> None:
    client = make_client(
        curve=CurveClientKeys(key_pairs["client"], key_pairs["server"].public), timeout=0.4
    )
    client.start("P", "127.0.0.1", server.port)
    assert isinstance(failure(client), HandshakeTimeoutError)
    assert server.counters.replies == 0


# --- keys ---------------------------------------------------------------------------------------


def test_keys_are_made_by_the_command_and_readable_by_their_owner_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "keys"
    old = os.umask(0)
    try:
        assert keys.main([str(directory)]) == 0
    finally:
        os.umask(old)
    names = ["client.key", "client.key_secret", "server.key", "server.key_secret"]
    assert sorted(path.name for path in directory.iterdir()) == names
    for path in directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    printed = capsys.readouterr().out.split()
    assert sorted(printed) == [str(directory / name) for name in names]

    pair = keys.load_secret_key(directory / "server.key_secret")
    assert pair.public == keys.load_public_key(directory / "server.key")
    assert (pair.public, pair.secret) == zmq.auth.load_certificate(directory / "server.key_secret")
    assert pair.secret.decode() not in repr(pair)
    assert pair.secret not in (directory / "server.key").read_bytes()


def test_existing_keys_are_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys.main([str(tmp_path), "server"]) == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert keys.main([str(tmp_path), "server"]) == 1
    assert "exists" in capsys.readouterr().err
    (tmp_path / "server.key").unlink()
    assert keys.main([str(tmp_path), "server"]) == 1
    assert (tmp_path / "server.key_secret").read_bytes() == before["server.key_secret"]


@pytest.mark.parametrize("name", ["../evil", "", ".hidden", "a/b", "a\0b"])
def test_key_names_are_plain_file_names(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="key name"):
        keys.write_key_pair(tmp_path, name, keys.generate_key_pair())
    assert not list(tmp_path.iterdir())


def test_the_allowed_clients_are_the_public_keys_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.key file"):
        keys.load_allowed_clients(tmp_path)
    pairs = [keys.generate_key_pair() for _ in range(3)]
    for index, pair in enumerate(pairs):
        keys.write_key_pair(tmp_path, f"decode-{index}", pair)
    assert keys.load_allowed_clients(tmp_path) == {pair.public for pair in pairs}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no public key"),
        ('    public-key = "short"\n', "not 40 characters"),
        (f'    public-key = "{"x" * 39}~"\n', "not 40 characters"),
        (f'    public-key = "{"0" * 40}"\n', "no secret key"),
        (f'public-key = "{"0" * 40}"\nsecret-key = "{"1" * 40}"\n', "does not belong"),
        ("x" * 20_000, "larger than a key file"),
    ],
)
def test_a_file_that_is_no_key_is_refused_by_name(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "server.key_secret"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=message) as error:
        keys.load_secret_key(path)
    assert str(path) in str(error.value)


def test_a_key_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.key cannot be read: No such file"):
        keys.load_public_key(tmp_path / "absent.key")


def test_a_secret_that_others_may_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = keys.write_key_pair(tmp_path, "server", keys.generate_key_pair())
    keys.load_secret_key(path)
    assert not caplog.records
    path.chmod(0o640)
    keys.load_secret_key(path)
    assert "chmod 600" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING


def test_importing_needs_no_zeromq() -> None:
    code = (
        "import sys; sys.modules['zmq'] = None; "
        "import kvnixl.handshake, kvnixl.keys, kvnixl.heartbeat, kvnixl.deadlines"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

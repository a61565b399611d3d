"""The control plane in figures: deadlines, one handshake, a handshake beside black holes, and a
thousand peers at once.

``python bench/bench_control.py`` prints a table. Server and clients of the handshakes share one
core, and all of it runs over loopback without NIXL.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvnixl.bench.overhead import ReaderSide
from kvnixl.compat import CompatibilityCheck
from kvnixl.deadlines import Deadlines
from kvnixl.handshake import HandshakeClient, HandshakeDone, HandshakeServer
from kvnixl.heartbeat import HeartbeatSender, HeartbeatTracker, RemoteRank
from kvnixl.metadata import (
    KvNixlExtension,
    Lease,
    LeaseSlotRegion,
    NixlAgentMetadata,
    NixlHandshakePayload,
    TransferParams,
)
from kvnixl.wire import encode_agent_metadata, encode_handshake_payload

LEASES = 100_000
REGIONS = 160
PEERS = 1_000
ROUNDS = 10
WARM_UP_ROUNDS = 5  # until the allocator has what it needs
COMPAT = CompatibilityCheck({"model": "llama", "dtype": "bfloat16", "num_kv_heads": 8})


def payload() -> bytes:
    """What a worker with 160 regions exports, with a NIXL blob of a usual size."""
    metadata = NixlAgentMetadata(
        "P",
        os.urandom(4096),
        kv_caches_base_addr=[(1 << 46) + index * (1 << 30) for index in range(REGIONS)],
        device_id=0,
        num_blocks=10_000,
        block_lens=[65_536] * REGIONS,
        block_strides=[65_536] * REGIONS,
        kv_cache_layout="LBHNC",
        block_size=16,
        ssm_sizes=(0, 0),
        attn_backend_name="FLASH_ATTN",
        physical_blocks_per_logical_kv_block=1,
        region_names=[f"model.layers.{index}.self_attn.attn" for index in range(REGIONS)],
        kvnixl=KvNixlExtension(
            incarnation=7,
            lease_slots=LeaseSlotRegion(1 << 40, 4096),
            factors=COMPAT.factors_text,
        ),
    )
    return encode_handshake_payload(
        NixlHandshakePayload(COMPAT.hash, encode_agent_metadata(metadata))
    )


def row(what: str, value: str, target: str = "") -> None:
    print(f"{what:<64}{value:>14}  {target}")


def nanoseconds(call: Callable[[], object], number: int) -> float:
    """Median over five repetitions of one call's time; the loop's own cost is subtracted."""

    def loop(body: Callable[[], object]) -> float:
        start = time.perf_counter_ns()
        for _ in range(number):
            body()
        return (time.perf_counter_ns() - start) / number

    def nothing() -> None:
        return None

    return statistics.median(loop(call) - loop(nothing) for _ in range(5))


def bench_deadlines() -> None:
    def filled(count: int) -> Deadlines[str]:
        deadlines: Deadlines[str] = Deadlines()
        for index in range(count):
            deadlines.add(f"request-{index}", 1_000.0 + index % 977)
        return deadlines

    few, many = filled(10), filled(LEASES)
    row(
        "expired() with nothing due, 10 leases",
        f"{nanoseconds(lambda: few.expired(1.0), 100_000):.0f} ns",
    )
    row(
        f"expired() with nothing due, {LEASES:,} leases",
        f"{nanoseconds(lambda: many.expired(1.0), 100_000):.0f} ns",
        "target 300 ns",
    )
    keys = [f"request-{index}" for index in range(LEASES)]

    def each(call: Callable[[str], object]) -> str:
        start = time.perf_counter_ns()
        for key in keys:
            call(key)
        return f"{(time.perf_counter_ns() - start) / LEASES:.0f} ns"

    fresh: Deadlines[str] = Deadlines()
    row("add, per lease", each(lambda key: fresh.add(key, 1_000.0)))
    row("extend, per lease", each(lambda key: fresh.extend(key, 2_000.0)))
    start = time.perf_counter()
    assert fresh.expired(1_500.0) == []
    row(
        f"expired() that meets {LEASES:,} renewed leases at once",
        f"{(time.perf_counter() - start) * 1e3:.0f} ms",
    )
    start = time.perf_counter()
    assert len(fresh.expired(2_000.0)) == LEASES
    row(
        "expired() when all are due, per lease",
        f"{(time.perf_counter() - start) / LEASES * 1e9:.0f} ns",
    )


def bench_heartbeats() -> None:
    requests = 10_000
    tracker = HeartbeatTracker(30.0)
    params = [
        TransferParams(
            do_remote_prefill=True,
            remote_engine_id="P",
            remote_request_id=f"cmpl-{index:032x}-0-{index:08x}",
            remote_host="10.0.0.1",
            remote_port=5600,
            tp_size=8,
            kvnixl_lease=str(Lease(index, index + 1)),
        )
        for index in range(requests)
    ]
    start = time.perf_counter()
    for index, each in enumerate(params):
        tracker.start(f"request-{index}", each, 0.0)
    row(
        "heartbeats: start, per request", f"{(time.perf_counter() - start) / requests * 1e6:.1f} us"
    )
    tracker.take_due(0.0)
    row(
        f"heartbeats: a step with nothing due, {requests:,} requests",
        f"{nanoseconds(lambda: tracker.take_due(1.0), 100_000):.0f} ns",
    )
    start = time.perf_counter()
    due = tracker.take_due(100.0)
    row(
        f"heartbeats: take_due, {requests:,} requests",
        f"{(time.perf_counter() - start) * 1e3:.1f} ms",
    )
    for binary in (True, False):
        sent: list[bytes] = []
        ranks = [RemoteRank(f"P-{rank}", binary) for rank in range(8)]

        def send_notif(agent: str, message: bytes, sent: list[bytes] = sent) -> None:
            sent.append(message)

        def ranks_of(engine_id: str, ranks: list[RemoteRank] = ranks) -> list[RemoteRank]:
            return ranks

        sender = HeartbeatSender(30.0, send_notif, sender=1, next_sequence=int)
        start = time.perf_counter()
        sender.send(due, ranks_of, 0.0)
        row(
            f"heartbeats: encode for 8 ranks, {'binary' if binary else 'text'}, "
            f"{len(sent) // 8} messages a rank",
            f"{(time.perf_counter() - start) * 1e3:.1f} ms",
        )


# --- handshakes ---------------------------------------------------------------------------------


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def serve(pipe: Connection) -> None:
    with HandshakeServer("0.0.0.0", 0, advertised_host="10.0.0.1") as server:
        server.start({(0, 0): payload()})
        pipe.send(server.port)
        while pipe.recv() is not None:
            pipe.send((resident_mib(), server.counters.as_dict()))


def handshake(client: HandshakeClient, port: int) -> float:
    """Seconds from the start of one handshake to its outcome."""
    start = time.perf_counter()
    client.start("P", "127.0.0.1", port)
    (outcome,) = client.poll(10.0)
    assert isinstance(outcome, HandshakeDone), outcome
    return time.perf_counter() - start


def milliseconds(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.2f} ms"


def bench_handshakes(port: int) -> None:
    with HandshakeClient(COMPAT) as client:
        handshake(client, port)
        times = [handshake(client, port) for _ in range(200)]
        row(f"handshake, {REGIONS} regions, median of 200", milliseconds(times))
        row("handshake, slowest of 200", f"{max(times) * 1e3:.2f} ms")
        alone = milliseconds([handshake(client, port) for _ in range(100)])
        holes = [socket.create_server(("127.0.0.1", 0)) for _ in range(20)]
        for index, hole in enumerate(holes):
            client.start(f"hole {index}", "127.0.0.1", hole.getsockname()[1], timeout=600.0)
        client.poll(0.1)
        beside = milliseconds([handshake(client, port) for _ in range(100)])
        for hole in holes:
            hole.close()
        row(
            "handshake beside 20 black holes, median of 100",
            beside,
            f"{alone} without; target 100 ms",
        )

    def cold() -> float:
        start = time.perf_counter()
        with HandshakeClient(COMPAT) as client:
            handshake(client, port)
            return time.perf_counter() - start

    row("handshake of a new client, median of 50", milliseconds([cold() for _ in range(50)]))

    def loaded() -> float:
        """Seconds from an answer that is there to prepared lists, with NIXL's own calls empty."""
        side = ReaderSide(REGIONS, 10_000)
        try:
            side.reader.prepare("engine-0", "10.0.0.1", 1024, touch=False)
            start = time.perf_counter()
            side.reader.step()
            return time.perf_counter() - start
        finally:
            side.close()

    loading = [loaded() for _ in range(50)]
    row("loading what it answered: layout, plan, lists, median of 50", milliseconds(loading))
    row(
        "from the first byte to registered, without NIXL's own part",
        f"{(statistics.median(times) + statistics.median(loading)) * 1e3:.2f} ms",
        "target 5 ms",
    )


def bench_thousand_peers(port: int, ask_server: Callable[[], tuple[float, dict[str, int]]]) -> None:
    memory = []
    for round_number in range(ROUNDS):
        with HandshakeClient(COMPAT, timeout=60.0, max_concurrent=PEERS) as client:
            start = time.perf_counter()
            for index in range(PEERS):
                client.start("P", f"127.0.{1 + index // 250}.{1 + index % 250}", port)
            done = 0
            while done < PEERS:
                outcomes = client.poll(5.0)
                assert all(isinstance(outcome, HandshakeDone) for outcome in outcomes)
                done += len(outcomes)
            seconds = time.perf_counter() - start
        memory.append(ask_server()[0])
        row(
            f"{PEERS:,} peers at once, round {round_number + 1}",
            f"{seconds:.2f} s",
            f"target 3 s; server {memory[-1]:.1f} MiB",
        )
    growth = max(memory[WARM_UP_ROUNDS:]) - memory[WARM_UP_ROUNDS - 1]
    row(f"server memory, growth after round {WARM_UP_ROUNDS}", f"{growth:+.1f} MiB", "target: flat")


def main() -> None:
    bench_deadlines()
    bench_heartbeats()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    context: Any = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()

    def ask_server() -> tuple[float, dict[str, int]]:
        ours.send("state")
        state: tuple[float, dict[str, int]] = ours.recv()
        return state

    port = ours.recv()
    bench_handshakes(port)
    bench_thousand_peers(port, ask_server)
    counters = ask_server()[1]
    assert not any(count for name, count in counters.items() if name != "replies"), counters
    ours.send(None)
    process.join(10)


if __name__ == "__main__":
    main()

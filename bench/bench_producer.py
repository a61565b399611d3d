"""What the producer's own code costs: an idle step, and the life of a lease.

``python bench/bench_producer.py`` prints a table. The agent below answers at once, so that only
kvnixl's time is measured; what NIXL itself takes to say that nothing arrived comes on top. All
times are the thread's CPU time: none of this waits for anything.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from kvnixl.bench.overhead import ProducerSide
from kvnixl.wire import Outcome, encode_completion, encode_heartbeat

FEW, MANY = 10, 100_000
PEERS = 1_000
BATCH = 1_000
CALLS = 20_000
ROUNDS = 9


class Side(ProducerSide):
    """A producer that holds ``leases`` requests under a lease and has heard `PEERS` peers."""

    def __init__(self, leases: int) -> None:
        super().__init__(leases, PEERS, spare=BATCH)
        self.leases = leases

    def life(self) -> float:
        """Microseconds a lease from hold to report, `BATCH` of them in one step."""
        begin = time.thread_time_ns()
        leases = [self.hold(f"r{i}", self.leases + i, 10.0) for i in range(BATCH)]
        held = time.thread_time_ns()
        self.raw.inbox["D"] = [
            encode_completion(Outcome.DONE, 1, sender=1, sequence=i, leases=[lease])
            for i, lease in enumerate(leases)
        ]
        sent = time.thread_time_ns()
        assert len(self.producer.step()) == BATCH
        return (time.thread_time_ns() - sent + held - begin) / BATCH / 1e3

    def heartbeats(self) -> float:
        """Microseconds a lease that one heartbeat of `FEW` leases renews."""
        leases = [(slot, slot + 1) for slot in range(FEW)]
        message = encode_heartbeat(30.0, sender=1, sequence=1, leases=leases)
        self.raw.inbox["D"] = [message] * (BATCH // FEW)
        begin = time.thread_time_ns()
        assert self.producer.step() == []
        return (time.thread_time_ns() - begin) / BATCH / 1e3


def nanoseconds(call: Callable[[], object]) -> float:
    begin = time.thread_time_ns()
    for _ in range(CALLS):
        call()
    return (time.thread_time_ns() - begin) / CALLS


def row(what: str, value: str, target: str = "") -> None:
    print(f"{what:<64}{value:>14}  {target}")


def main() -> None:
    few, many = Side(FEW), Side(MANY)
    calls: dict[str, Callable[[], object]] = {
        "few": few.producer.step,
        "many": many.producer.step,
        "agent": many.agent.get_new_notifs,
    }
    # Alternating, so that a busy machine slows all of them down alike.
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            times[name].append(nanoseconds(call))
    idle = {name: statistics.median(values) for name, values in times.items()}
    peers = f"{PEERS:,} peers"
    row(f"idle step(), {FEW} leases, {peers}", f"{idle['few']:.0f} ns")
    row(f"idle step(), {MANY:,} leases, {peers}", f"{idle['many']:.0f} ns", "target 2000 ns")
    row("of that, Agent.get_new_notifs()", f"{idle['agent']:.0f} ns")
    row(f"many leases against {FEW}", f"{idle['many'] / idle['few']:.2f} x", "target 1.1 x")
    for what, measure in (
        (f"hold, completion and report, per lease, beside {MANY:,}", many.life),
        ("heartbeat, per lease", many.heartbeats),
    ):
        row(what, f"{statistics.median(measure() for _ in range(ROUNDS)):.2f} us")
    few.close()
    many.close()


if __name__ == "__main__":
    main()

"""Read blocks that are given away while they are read; no foreign byte may be accepted.

One process owns blocks on two ranks and keeps offering, freeing and overwriting them at random
moments. Another one reads what it was offered over real NIXL, as fast as it can, and has every read
verified. All bytes of every read are compared with what was offered, so that each wrong acceptance
and each caught race is seen.

    python scripts/soak.py [--seconds 60] [--transport sm --transport tcp]

Exit status 0: reads were accepted, races were caught, no accepted read holds a foreign byte.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import numpy.typing as npt

from kvnixl.agent import LOCAL_SIDE, Agent, wait_until
from kvnixl.leases import (
    LEASE_SLOT_BYTES,
    LeaseSlotAllocator,
    LeaseVerifier,
    ProducerLeaseSlots,
    lease_slot_descs,
)

# sm: what UCX chooses on one machine, whatever the user's own environment says
TRANSPORTS = {"sm": {"UCX_TLS": "all"}, "tcp": {"UCX_TLS": "tcp"}}
NUM_RANKS = 2
NUM_SLOTS = 32
NUM_BLOCKS = 64
BLOCK_WORDS = 2048
BLOCKS_PER_REQUEST = 2
READS_IN_FLIGHT = 4
MAX_LIVE = 8
START_TIMEOUT_S = 60.0
SHUTDOWN_TIMEOUT_S = 10.0

Offer = tuple[str, int, int, list[int], int]  # request id, slot, nonce, block ids, content


def block_descs(blocks: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    size = blocks[0].nbytes
    return np.array([[blocks.ctypes.data, size, 0, size, len(blocks)]], np.uint64)


def spin(rng: random.Random, most_us: float) -> None:
    end = time.perf_counter() + rng.random() * most_us / 1e6
    while time.perf_counter() < end:
        pass


# --- the process that owns the blocks -----------------------------------------------------------


def own(pipe: Connection, seed: int, free_first: bool) -> None:
    rng = random.Random(seed)
    agent = Agent.open("producer", num_threads=1)
    ranks = [ProducerLeaseSlots(NUM_SLOTS) for _ in range(NUM_RANKS)]
    blocks = [np.zeros((NUM_BLOCKS, BLOCK_WORDS), np.int64) for _ in range(NUM_RANKS)]
    for slots, memory in zip(ranks, blocks, strict=True):
        agent.register_memory([(slots.base_addr, NUM_SLOTS * LEASE_SLOT_BYTES, 0)])
        agent.register_memory([(memory.ctypes.data, memory.nbytes, 0)])
    pipe.send(
        (
            agent.get_agent_metadata(),
            [lease_slot_descs(slots.base_addr, NUM_SLOTS) for slots in ranks],
            [block_descs(memory) for memory in blocks],
        )
    )
    allocator = LeaseSlotAllocator(NUM_SLOTS)
    free_blocks = list(range(NUM_BLOCKS))
    live: dict[str, list[int]] = {}
    made = 0

    def end(req_id: str) -> None:
        """Clear the slots, fence, and only then let others write the blocks."""
        ids = live.pop(req_id)
        for slots, memory in zip(ranks, blocks, strict=True):
            if free_first:
                memory[ids] = -1
                spin(rng, 100)
            slots.clear(req_id)
            slots.publish()
            memory[ids] = -1
        allocator.release(req_id, clear=False)
        free_blocks.extend(ids)

    while not pipe.poll():
        while len(live) < MAX_LIVE:
            made += 1
            req_id = f"r{made}"
            ids = [
                free_blocks.pop(rng.randrange(len(free_blocks))) for _ in range(BLOCKS_PER_REQUEST)
            ]
            content = rng.getrandbits(63)
            for memory in blocks:
                memory[ids] = content
            lease = allocator.acquire(req_id)
            assert lease is not None
            to_arm, to_clear = allocator.take_updates()
            for slots in ranks:
                slots.update(to_clear, to_arm)
                slots.publish()
            live[req_id] = ids
            pipe.send((req_id, *lease, ids, content))
        spin(rng, 300)
        end(rng.choice(list(live)))
    pipe.recv()
    for req_id in list(live):
        end(req_id)
    agent.close()
    for slots in ranks:
        slots.close()


# --- the process that reads them ----------------------------------------------------------------


@dataclass
class Fetch:
    offer: Offer
    landing: list[int]
    reads: list[Any]
    checking: bool = False


def read(producer: Connection, parent: Connection, seed: int, seconds: float) -> None:
    rng = random.Random(seed)
    agent = Agent.open("reader", num_threads=1)
    metadata, slot_descs, their_blocks = producer.recv()
    peer = agent.add_remote_agent(metadata)
    agent.make_connection(peer)
    verifier = LeaseVerifier(agent, num_cells=64)
    for rank, descs in enumerate(slot_descs):
        verifier.add_remote("producer", rank, agent.prep_xfer_dlist(peer, descs), NUM_SLOTS)
    per_fetch = NUM_RANKS * BLOCKS_PER_REQUEST
    landing = np.zeros((READS_IN_FLIGHT * per_fetch, BLOCK_WORDS), np.int64)
    agent.register_memory([(landing.ctypes.data, landing.nbytes, 0)])
    local = agent.prep_xfer_dlist(LOCAL_SIDE, block_descs(landing))
    remote = [agent.prep_xfer_dlist(peer, descs) for descs in their_blocks]
    free = [list(range(i * per_fetch, (i + 1) * per_fetch)) for i in range(READS_IN_FLIGHT)]
    offers: deque[Offer] = deque(maxlen=MAX_LIVE)
    fetches: dict[str, Fetch] = {}
    counts: Counter[str] = Counter()
    parent.send("ready")
    stop_at = time.monotonic() + seconds
    while fetches or time.monotonic() < stop_at:
        while producer.poll():
            offers.append(producer.recv())
        while free and offers and time.monotonic() < stop_at:
            offer = offers[rng.randrange(len(offers))]
            req_id, slot, nonce, ids, _content = offer
            if req_id in fetches:
                break
            rows = free.pop()
            reads = []
            for rank in range(NUM_RANKS):
                mine = rows[rank * BLOCKS_PER_REQUEST : (rank + 1) * BLOCKS_PER_REQUEST]
                reads.append(agent.make_prepped_xfer("READ", local, mine, remote[rank], ids))
            verifier.add_checks(req_id, "producer", range(NUM_RANKS), slot, nonce)
            fetches[req_id] = Fetch(offer, rows, reads)
            for xfer in reads:
                agent.transfer(xfer)
        done = []
        for req_id, fetch in fetches.items():
            if not fetch.checking and all(agent.check_xfer_state(x) == "DONE" for x in fetch.reads):
                fetch.checking = True
                done.append(req_id)
        verified, failed = verifier.step(done)
        for req_id in [*verified, *failed]:
            fetch = fetches.pop(req_id)
            right = bool((landing[fetch.landing] == fetch.offer[4]).all())
            if req_id in verified:
                counts["accepted" if right else "foreign"] += 1
            elif "could not be read" in failed[req_id]:
                counts["unreadable"] += 1
            else:
                counts["refused" if right else "caught"] += 1
            for xfer in fetch.reads:
                agent.release_xfer_handle(xfer)
            landing[fetch.landing] = 0
            free.append(fetch.landing)
    # A request fails with its first rank; the slot READs of the others may still be under way.
    wait_until(lambda: not verifier.shutdown(), SHUTDOWN_TIMEOUT_S)
    counts["left"] = verifier.shutdown()
    for prepared in (local, *remote):
        agent.release_dlist_handle(prepared)
    agent.remove_remote_agent(peer)
    agent.close()
    parent.send(dict(counts))


# --- both ---------------------------------------------------------------------------------------


def run(transport: str, seconds: float, seed: int, free_first: bool) -> Counter[str]:
    context = mp.get_context("spawn")
    for_producer, for_reader = context.Pipe()
    mine, readers = context.Pipe()
    processes: list[BaseProcess] = [
        context.Process(target=own, args=(for_producer, seed, free_first), daemon=True),
        context.Process(target=read, args=(for_reader, readers, seed + 1, seconds), daemon=True),
    ]
    before = dict(os.environ)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.update(TRANSPORTS[transport])
    try:
        for process in processes:
            process.start()
    finally:
        os.environ.clear()
        os.environ.update(before)
    readers.close()
    try:
        for limit in (START_TIMEOUT_S, seconds + START_TIMEOUT_S):
            if not mine.poll(limit):
                raise TimeoutError(f"{transport}: the reader said nothing for {limit:.0f} s")
            answer = mine.recv()
        for_reader.send("stop")
        until = time.monotonic() + START_TIMEOUT_S
        while processes[0].is_alive() and time.monotonic() < until:
            # The reader takes no more offers, and a full pipe would stop the producer.
            if for_reader.poll(0.05):
                for_reader.recv()
        for process in processes:
            process.join(START_TIMEOUT_S)
            if process.exitcode != 0:
                raise RuntimeError(f"{transport}: {process.name} ended with {process.exitcode}")
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
    return Counter(answer)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="per transport (default: 60)")
    parser.add_argument("--transport", choices=TRANSPORTS, action="append", help="default: each")
    parser.add_argument("--seed", type=int, help="default: another one each time")
    parser.add_argument(
        "--free-first",
        action="store_true",
        help="break the protocol: blocks are overwritten before their slot is cleared",
    )
    options = parser.parse_args()
    if options.seconds <= 0:
        parser.error(f"--seconds must be above 0, not {options.seconds}")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    wrong = False
    for transport in options.transport or TRANSPORTS:
        counts = run(transport, options.seconds, seed, options.free_first)
        print(
            f"{transport:>4}: accepted {counts['accepted']}, races caught {counts['caught']}, "
            f"refused although right {counts['refused']}, unreadable {counts['unreadable']}, "
            f"foreign bytes accepted {counts['foreign']}, landing cells left {counts['left']}",
            flush=True,
        )
        wrong |= bool(counts["foreign"] or counts["left"])
        wrong |= not (counts["accepted"] and counts["caught"])
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())

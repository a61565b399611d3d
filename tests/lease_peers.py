"""An owner of lease slots and a reader that checks them, over real NIXL, for child processes."""

from __future__ import annotations

import time
from typing import Any

from kvnixl.agent import Agent
from kvnixl.leases import (
    LEASE_SLOT_BYTES,
    LeaseVerifier,
    ProducerLeaseSlots,
    lease_slot_descs,
)

NUM_SLOTS = 64
NUM_CELLS = 16


class SlotOwner:
    def __init__(self, name: str) -> None:
        self.agent = Agent.open(name, num_threads=1)
        self.slots = ProducerLeaseSlots(NUM_SLOTS)
        self.agent.register_memory([(self.slots.base_addr, NUM_SLOTS * LEASE_SLOT_BYTES, 0)])

    def address(self) -> tuple[bytes, int]:
        return self.agent.get_agent_metadata(), self.slots.base_addr

    def update(self, to_clear: set[str], to_arm: dict[str, tuple[int, int]]) -> None:
        self.slots.update(to_clear, to_arm)
        self.slots.publish()

    def close(self) -> None:
        self.agent.close()
        self.slots.close()


class SlotReader:
    """A reader with a raw ``nixl_agent`` or with the project's `Agent`."""

    def __init__(self, raw: bool, timeout: float) -> None:
        if raw:
            from nixl._api import nixl_agent, nixl_agent_config

            self.agent: Any = nixl_agent("reader", nixl_agent_config(num_threads=1))
        else:
            self.agent = Agent.open("reader", num_threads=1)
        self.raw = raw
        self.verifier = LeaseVerifier(self.agent, NUM_CELLS, timeout=timeout)
        self.registration: Any = None
        if raw:
            # As code does that registers the tensor and prepares the list itself all the same.
            self.registration = self.agent.register_memory(self.verifier.tensor)
            self.verifier.local_handle = self.agent.prep_xfer_dlist(
                "NIXL_INIT_AGENT", lease_slot_descs(self.verifier.base_addr, NUM_CELLS), "DRAM"
            )

    def meet(self, engine_id: str, address: tuple[bytes, int]) -> None:
        metadata, base_addr = address
        peer = self.agent.add_remote_agent(metadata)
        descs = lease_slot_descs(base_addr, NUM_SLOTS)
        prepared = self.agent.prep_xfer_dlist(peer, descs, mem_type="DRAM")
        self.agent.make_connection(peer)
        self.verifier.add_remote(engine_id, 0, prepared)

    def verify(
        self, leases: dict[str, tuple[str, int, int]], seconds: float = 20.0
    ) -> tuple[set[str], dict[str, str]]:
        """Check leases ``(engine, slot, nonce)`` of requests whose blocks count as read."""
        for req_id, (engine_id, slot, nonce) in leases.items():
            self.verifier.add_check(req_id, engine_id, 0, slot, nonce)
        verified, failed = self.verifier.step(leases)
        until = time.monotonic() + seconds
        while self.verifier.has_checks and time.monotonic() < until:
            more_verified, more_failed = self.verifier.step()
            verified |= more_verified
            failed |= more_failed
        return verified, failed

    def cells(self) -> tuple[int, int]:
        self.verifier.step()
        return self.verifier.free_cells, self.verifier.quarantined_cells

    def wait_for_cells(self, seconds: float = 20.0) -> tuple[int, int]:
        until = time.monotonic() + seconds
        while self.verifier.quarantined_cells and time.monotonic() < until:
            self.verifier.step()
        return self.cells()

    def words(self) -> list[int]:
        return self.verifier.words.tolist()

    def close(self) -> None:
        left = self.verifier.shutdown()
        assert left == 0, left
        if self.raw:
            self.agent.deregister_memory(self.registration)
        else:
            live = self.agent.live
            assert live == {
                "transfers": 0,
                "prepared_lists": 0,
                "registrations": 0,
                "remote_agents": live["remote_agents"],
            }
            assert self.agent.close() == 0

"""A peer for transport tests: one region of blocks and a `NixlTransport` over it."""

from __future__ import annotations

import gc
import logging
import os
import time
from typing import Any

import numpy as np

from kvnixl.transport import NixlTransport


class Lines(logging.Handler):
    """What kvnixl logs, as text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("kvnixl").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def close(self) -> None:
        logging.getLogger("kvnixl").removeHandler(self)
        super().close()


class BlockPeer:
    """Made in the test's process or in a child (`tests.procs.Child`)."""

    def __init__(self, name: str, num_blocks: int, block_len: int, fill: int) -> None:
        self.blocks = np.full((num_blocks, block_len), fill, np.uint8)
        self.transport = NixlTransport(name, memoryview(self.blocks), num_threads=1)
        self.ended: dict[int, str] = {}
        self.log = Lines()

    def logged(self) -> list[str]:
        return self.log.lines

    def address(self) -> tuple[bytes, int, int, int]:
        t = self.transport
        return t.get_agent_metadata(), t.base_addr, t.num_blocks, t.block_len

    def add(self, peer_id: str, address: tuple[bytes, int, int, int]) -> None:
        self.transport.add_remote_peer(peer_id, *address)

    def remove(self, peer_id: str) -> None:
        self.transport.remove_remote_peer(peer_id)

    def write(self, peer_id: str, local: list[int], remote: list[int]) -> int | None:
        return self.transport.write_blocks(peer_id, local, remote)

    def read(self, peer_id: str, local: list[int], remote: list[int]) -> int | None:
        return self.transport.read_blocks(peer_id, local, remote)

    def wait(self, transfer_id: int, timeout: float = 20.0) -> str:
        """Poll until the transfer ended: "done" or "failed"."""
        deadline = time.monotonic() + timeout
        while True:
            done, failed = self.transport.poll()
            self.ended.update(dict.fromkeys(done, "done"))
            self.ended.update(dict.fromkeys(failed, "failed"))
            if transfer_id in self.ended:
                return self.ended.pop(transfer_id)
            if time.monotonic() >= deadline:
                return "running"
            time.sleep(0.0002)

    def label(self, seed: int) -> None:
        """Give every byte a value of its own block and seed."""
        rng = np.random.default_rng(seed)
        self.blocks[:] = rng.integers(0, 256, self.blocks.shape, np.uint8)

    def content(self, indices: list[int]) -> bytes:
        return self.blocks[indices].tobytes()

    def digest_matches(self, indices: list[int], seed: int, their: list[int]) -> bool:
        """Whether our blocks hold what a peer of the same shape labelled with ``seed`` has."""
        rng = np.random.default_rng(seed)
        labelled = rng.integers(0, 256, self.blocks.shape, np.uint8)
        return bool((self.blocks[indices] == labelled[their]).all())

    def leftovers_as(self, expected: dict[str, int], timeout: float = 20.0) -> dict[str, int]:
        """Poll until the leftovers are as expected; what they are in the end."""
        deadline = time.monotonic() + timeout
        while self.leftovers() != expected and time.monotonic() < deadline:
            self.transport.poll()
        return self.leftovers()

    def leftovers(self) -> dict[str, int]:
        agent = self.transport.agent
        return {**agent.live, "quarantined": agent.quarantined}

    def late_bytes(self, how: str, peer_id: str, indices: list[int]) -> int:
        """Give a running READ up, wait until the transport calls it over, clear the blocks; how
        many of their bytes are written afterwards."""
        for _ in range(10):
            transfer_id = self.read(peer_id, indices, indices[::-2] + indices[-2::-2])
            assert transfer_id is not None
            if transfer_id not in self.transport.poll().done:
                break
        else:
            raise AssertionError("it always ended too soon to be given up")
        if how == "cancel":
            assert self.transport.cancel([transfer_id], "wait") == [transfer_id]
        else:
            self.remove(peer_id)
        assert self.wait(transfer_id) in ("done", "failed")
        self.blocks[:] = 0
        time.sleep(0.3)  # the time in which late bytes would arrive
        return int(np.count_nonzero(self.blocks))

    def threads(self) -> int:
        return len(os.listdir("/proc/self/task"))

    def close_transport(self) -> None:
        self.transport.close()
        gc.collect()

    def open_files(self) -> int:
        return len(os.listdir("/proc/self/fd"))

    def call(self, method: str, *args: Any) -> Any:
        """The same interface as a child's."""
        return getattr(self, method)(*args)

    def close(self) -> None:
        self.transport.close()
        self.log.close()

"""What is measured: how many blocks each side has, which requests are fetched, and which blocks
they lie in."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvnixl.bench.cache import CacheShape
from kvnixl.bench.models import ModelShape

Order: TypeAlias = Literal["unfragmented", "reversed", "churned", "fragmented", "concurrent"]

# Those of single requests.
ORDERS: dict[Order, str] = {
    "unfragmented": "consecutive blocks on both sides",
    "reversed": "consecutive blocks, last one first on both sides",
    "churned": "from free lists through which every block has passed once",
    "fragmented": "random blocks on both sides; hardly any can be merged",
}

DEFAULT_TOKENS = (1, 128, 1000, 8000)
# Of the requests that are fetched at once: their size, and how many there are.
BURST_REQUEST_BYTES = 4 * 1024**2
BURST_REQUESTS = 64
MIN_BURST_REQUESTS = 8
MIN_BLOCKS = 4
MAX_BLOCKS = 2**20
# The longest request takes this much of the cache, so that there is something to choose from.
LONGEST_SHARE = 0.75


@dataclass(frozen=True)
class OverheadScale:
    """How large the requests and the numbers are with which kvnixl's own work is measured.

    Attributes:
        regions, request_blocks: of a request.
        leases: that a producer holds while it is idle.
        peers: that a producer or a reader knows while it is idle.
        samples: requests of each kind.
    """

    regions: int
    request_blocks: int
    leases: int
    peers: int
    samples: int

    @property
    def num_blocks(self) -> int:
        """Blocks of the caches: enough for a request of which no two are neighbours."""
        return 4 * self.request_blocks


FULL_SCALE = OverheadScale(
    regions=160, request_blocks=512, leases=100_000, peers=1_000, samples=200
)
QUICK_SCALE = OverheadScale(regions=16, request_blocks=64, leases=1_000, peers=50, samples=30)


@dataclass(frozen=True)
class Plan:
    """
    Attributes:
        too_long: request lengths in tokens that were asked for and do not fit.
        seconds: for the measurement; every row is measured at least once.
        requests: at most so many per row; ``None``: as many as the time allows.
        inject_wrong_byte: let the producer write one wrong byte.
        overhead: for kvnixl's own work.
    """

    model: ModelShape
    shape: CacheShape
    rows: list[Row]
    too_long: list[int]
    seconds: float
    requests: int | None
    seed: int
    inject_wrong_byte: bool = False
    overhead: OverheadScale = FULL_SCALE

    @property
    def burst(self) -> Burst:
        """What is measured after the rows."""
        return burst_of(self.shape)


@dataclass(frozen=True)
class Row:
    """Requests of one length and one kind of block list."""

    tokens: int
    blocks: int
    order: Order

    def __str__(self) -> str:
        return f"{self.tokens} tokens, {self.order}"


@dataclass(frozen=True)
class Burst:
    """Requests that are fetched at once. Their blocks are the first ones of both caches, request by
    request.

    Attributes:
        requests: how many.
        request_blocks: blocks of each.
        row: all of them together.
    """

    requests: int
    request_blocks: int
    row: Row


def burst_of(shape: CacheShape) -> Burst:
    """The burst that a cache has room for: smaller requests where hardly any would fit."""
    wanted = round(BURST_REQUEST_BYTES / shape.request_block_bytes)
    request_blocks = max(1, min(wanted, shape.blocks // MIN_BURST_REQUESTS))
    requests = min(BURST_REQUESTS, shape.blocks // request_blocks)
    blocks = requests * request_blocks
    return Burst(requests, request_blocks, Row(blocks * shape.block_size, blocks, "concurrent"))


def longest_request(blocks: int) -> int:
    """Blocks of the longest request that a cache of so many blocks serves."""
    return max(1, int(blocks * LONGEST_SHARE))


def bytes_per_block(model: ModelShape, block_size: int) -> int:
    """What one block more takes on both sides together. The reader has one region more than layers
    (`kvnixl.bench.paths.MemcpyPath`)."""
    return (2 * model.layers + 1) * model.token_bytes * block_size


def default_blocks(
    model: ModelShape, block_size: int, tokens: Sequence[int], memory_bytes: int
) -> int:
    """As many as the requests need and as fit into ``memory_bytes``; may be below `MIN_BLOCKS`."""
    needed = math.ceil(blocks_of(max(tokens), block_size) / LONGEST_SHARE)
    fitting = memory_bytes // bytes_per_block(model, block_size)
    return min(max(needed, MIN_BLOCKS), fitting, MAX_BLOCKS)


def blocks_of(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def request_lengths(shape: CacheShape, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """The lengths to measure, and those that do not fit, both in tokens and ascending.

    What fills no block is rounded up to one; what does not fit is replaced by the longest length
    that does.
    """
    longest = longest_request(shape.blocks) * shape.block_size
    wanted = sorted({max(count, shape.block_size) for count in tokens})
    lengths = {min(count, longest) for count in wanted}
    return sorted(lengths), [count for count in wanted if count > longest]


def rows(shape: CacheShape, lengths: Sequence[int]) -> list[Row]:
    """A request of one block has no order."""
    result = []
    for order in ORDERS:
        for tokens in lengths:
            blocks = blocks_of(tokens, shape.block_size)
            if blocks > 1 or order == "unfragmented":
                result.append(Row(tokens, blocks, order))
    return result


def block_lists(row: Row, pool: int, rng: random.Random) -> tuple[list[int], list[int]]:
    """The reader's and the producer's blocks of one request, from caches of ``pool`` blocks."""
    if row.order == "fragmented":
        return rng.sample(range(pool), row.blocks), rng.sample(range(pool), row.blocks)
    if row.order == "churned":
        return (
            _churned(pool, row.blocks, rng, decodes=True),
            _churned(pool, row.blocks, rng, decodes=False),
        )
    if row.order == "concurrent":
        return list(range(row.blocks)), list(range(row.blocks))
    local, remote = (rng.randint(0, pool - row.blocks) for _ in range(2))
    sides = [list(range(start, start + row.blocks)) for start in (local, remote)]
    if row.order == "reversed":
        for side in sides:
            side.reverse()
    return sides[0], sides[1]


def _churned(pool: int, blocks: int, rng: random.Random, *, decodes: bool) -> list[int]:
    """Blocks from the free list of an engine through which as many blocks as it has have passed.

    The list is first in, first out, and a request returns its blocks last one first, as in vLLM.
    Eight requests run at a time; those of a decoding engine grow block by block, in turns.
    """
    free = deque(range(pool))
    running: list[list[int]] = []
    longest = max(1, pool // 8)
    passed = 0

    def take(count: int) -> list[int]:
        nonlocal passed
        while len(free) < count:
            finish()
        passed += count
        return [free.popleft() for _ in range(count)]

    def finish() -> None:
        free.extend(reversed(running.pop(rng.randrange(len(running)))))

    while passed < pool:
        if len(running) == 8:
            finish()
        running.append(take(rng.randint(1, longest)))
        if decodes:
            for request in running:
                if free and rng.random() < 0.5:
                    request.extend(take(1))
    return take(blocks)


def row_rng(seed: int, row: Row) -> random.Random:
    """The source of a row's block lists."""
    return random.Random(f"{seed}, {row}")

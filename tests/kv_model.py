"""A naive model of paged KV caches: every byte has a label that says what belongs there.

It knows nothing of pieces, slices or descriptors: it puts the value of each (layer, plane, head,
position, component) where the engine's block table says, one position at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from kvnixl.layout import CacheLayout, layout_from_tensors
from kvnixl.topology import BlockPairs, ReadPlan

COMPONENTS = 2  # uint32 words of one head of one token
MAX_PLANES, MAX_HEADS, MAX_POSITIONS = 2, 16, 4096
STALE = 0xE000_0000  # labels from here on were in the memory before

Words = npt.NDArray[np.uint32]

# Axes from the outermost in, for both orders inside a block.
STORAGES = {
    "apart": "LBP",  # a buffer for each layer
    "segments": "LPB",  # K and V of a layer one after the other
    "rows": "BLP",  # all layers of a block together
    "padded": "LBP",  # gaps between the blocks
    "padded rows": "BLP",
}


@functools.cache
def labels(layer: int, planes: int, heads: tuple[int, ...], position: int) -> Words:
    """The words of one position, shape (planes, heads, components). All labels are different."""
    word = (np.arange(planes) + layer * MAX_PLANES)[:, None, None] * MAX_HEADS
    word = (word + np.array(heads)[:, None]) * MAX_POSITIONS + position
    return (word * COMPONENTS + np.arange(COMPONENTS)).astype(np.uint32)


@dataclass
class Engine:
    """The KV caches of all ranks of an engine."""

    tp_size: int = 1
    kv_heads: int = 4
    block_size: int = 4  # of a kernel block
    num_blocks: int = 12  # logical
    kernel_blocks: int = 1
    kv_layout: str = "HND"
    layers: int = 2
    planes: int = 1
    storage: str = "apart"
    replicated: bool = False
    groups: Sequence[int] = ()  # group of each layer; all 0 by default
    windows: Sequence[int] = (0,)
    attn_backend: str = ""
    token_granular: bool = True
    pack_layers: bool = True
    arenas: list[Words] = field(init=False)
    views: list[list[Words]] = field(init=False)
    layouts: dict[int, CacheLayout] = field(init=False)

    def __post_init__(self) -> None:
        kernel_blocks = self.num_blocks * self.kernel_blocks
        heads = len(self.heads(0))
        sizes = {
            "L": self.layers,
            "B": kernel_blocks,
            "P": self.planes,
            "H": heads,
            "N": self.block_size,
            "C": COMPONENTS,
        }
        inside = "HNC" if self.kv_layout == "HND" else "NHC"
        step, steps = 1, {}
        for axis in reversed(STORAGES[self.storage] + inside):
            if axis == "B" and self.storage.startswith("padded"):
                step += 3
            steps[axis] = step
            step *= sizes[axis]
        guard = 5
        self.arenas, self.views, self.layouts = [], [], {}
        for _ in range(self.tp_size):
            arena = np.arange(STALE, STALE + step + 2 * guard, dtype=np.uint32)
            layers = [
                np.lib.stride_tricks.as_strided(
                    arena[guard + layer * steps["L"] :],
                    [sizes[axis] for axis in "BPHNC"],
                    [steps[axis] * arena.itemsize for axis in "BPHNC"],
                )
                for layer in range(self.layers)
            ]
            self.arenas.append(arena)
            self.views.append(layers)

    def heads(self, rank: int) -> tuple[int, ...]:
        """The heads of a rank, one by one."""
        if self.replicated:
            return (0,)
        if self.kv_heads >= self.tp_size:
            every = range(self.kv_heads)
            return tuple(h for h in every if h * self.tp_size // self.kv_heads == rank)
        return (rank * self.kv_heads // self.tp_size,)

    def group_of(self, layer: int) -> int:
        return self.groups[layer] if self.groups else 0

    def layout(self, rank: int) -> CacheLayout:
        if rank not in self.layouts:
            caches = {f"layers.{i}": view for i, view in enumerate(self.views[rank])}
            self.layouts[rank] = layout_from_tensors(
                caches,
                dims="B2HNC",
                num_kv_heads=self.kv_heads,
                tp_size=self.tp_size,
                replicated=tuple(caches) if self.replicated else (),
                groups={name: self.group_of(i) for i, name in enumerate(caches)},
                sliding_windows=self.windows,
                kv_layout=self.kv_layout,
                kernel_blocks_per_block=self.kernel_blocks,
                attn_backend=self.attn_backend,
                token_granular=self.token_granular,
                pack_layers=self.pack_layers,
            )
        return self.layouts[rank]

    def like(self) -> Engine:
        """Another engine of the same configuration, in memory of its own."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        return Engine(**given)

    @property
    def tokens_per_block(self) -> int:
        return self.block_size * self.kernel_blocks

    def slots(self, block_ids: Sequence[int], start: int) -> Iterator[tuple[int, int, int]]:
        """``(position, kernel block, slot)`` of a block table whose first token is ``start``."""
        for i, block in enumerate(block_ids):
            for token in range(self.tokens_per_block):
                kernel_block, slot = divmod(block * self.tokens_per_block + token, self.block_size)
                yield start + i * self.tokens_per_block + token, kernel_block, slot

    def fill(self, block_ids: Sequence[Sequence[int]], starts: Sequence[int]) -> None:
        """Put the labels into all slots of a sequence's blocks, on every rank."""
        for rank in range(self.tp_size):
            self.fill_rank(rank, block_ids, starts)

    def fill_rank(
        self,
        rank: int,
        block_ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        leave: Collection[tuple[int, int, int]] = (),
    ) -> None:
        """``leave``: (group, kernel block, slot) that keep what they have."""
        heads = self.heads(rank)
        for layer, view in enumerate(self.views[rank]):
            group = self.group_of(layer)
            for position, block, slot in self.slots(block_ids[group], starts[group]):
                if (group, block, slot) not in leave:
                    view[block, :, :, slot] = labels(layer, self.planes, heads, position)


def apply(plan: ReadPlan, pairs: BlockPairs, local: Words, remote: Sequence[Words]) -> None:
    """Copy what the plan says, with nothing but copies of bytes."""
    for read in plan.reads:
        local_lists, remote_lists = read.select(pairs)
        source = remote[read.remote_rank]
        for mine, theirs, number in zip(
            read.local_rows.tolist(), read.remote_rows.tolist(), read.row_groups, strict=True
        ):
            assert mine[1] == theirs[1]
            target_blocks = _blocks(local, mine)
            source_blocks = _blocks(source, theirs)
            target_blocks[local_lists[number]] = source_blocks[remote_lists[number]]


def _blocks(arena: Words, row: Sequence[int]) -> npt.NDArray[np.uint8]:
    """A strided region of an arena, shape (count, length)."""
    base, length, stride, count, device = row
    offset = base - arena.ctypes.data
    assert device == 0
    assert offset >= 0
    assert offset + (count - 1) * stride + length <= arena.nbytes
    return np.lib.stride_tricks.as_strided(
        arena.view(np.uint8)[offset:], (count, length), (stride, 1)
    )

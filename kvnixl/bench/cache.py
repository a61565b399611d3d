"""The KV cache of one side: one region per layer, K and V of a block next to each other."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvnixl.layout import CacheLayout, layout_from_addresses

WORD_BYTES = 8

Words: TypeAlias = npt.NDArray[np.uint64]
Region: TypeAlias = tuple[int, int, int, int, int]  # base, block_len, stride, count, device


@dataclass(frozen=True)
class CacheShape:
    """
    Attributes:
        layers: regions.
        blocks: blocks per region.
        block_bytes: bytes of one block in one region; a multiple of 8.
        block_size: tokens per block.
    """

    layers: int
    blocks: int
    block_bytes: int
    block_size: int

    @property
    def request_block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.layers * self.block_bytes

    @property
    def bytes_per_side(self) -> int:
        return self.blocks * self.request_block_bytes


class Cache:
    """Private, page-aligned memory in the given shape; all of it is touched.

    Attributes:
        layers: per layer an array of shape ``(blocks, words per block)``.
    """

    def __init__(self, shape: CacheShape) -> None:
        self.shape = shape
        self.layers = [allocate(shape) for _ in range(shape.layers)]

    @property
    def regions(self) -> list[Region]:
        """The regions, as `kvnixl._descs` takes them."""
        length, count = self.shape.block_bytes, self.shape.blocks
        return [(int(layer.ctypes.data), length, length, count, 0) for layer in self.layers]

    @property
    def layout(self) -> CacheLayout:
        """The same, as producers and readers take it."""
        return layout_from_addresses(
            [int(layer.ctypes.data) for layer in self.layers],
            block_len=self.shape.block_bytes,
            num_blocks=self.shape.blocks,
            block_size=self.shape.block_size,
            num_kv_heads=1,
        )


def allocate(shape: CacheShape) -> Words:
    """One region."""
    memory = mmap.mmap(
        -1, shape.blocks * shape.block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    words = np.frombuffer(memory, np.uint64).reshape(shape.blocks, -1)
    words.fill(0)  # page faults belong to no measurement
    return words

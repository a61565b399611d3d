"""What every byte of the cache has to be.

Word ``i`` of a block is ``table[i] ^ key``: the table holds random words, the same for all blocks,
and the key is another one for every layer, block and generation. Both sides derive both from the
seed. A block that is stale, of another layer, another block, shifted or torn therefore differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvnixl.bench.cache import WORD_BYTES, Cache, CacheShape, Words

# Blocks are handled in groups that stay in the processor's cache.
_GROUP_BYTES = 256 * 1024


@dataclass(frozen=True)
class WrongByte:
    """The first byte of a transfer that is not what the producer wrote.

    Attributes:
        layer, remote_block, local_block, offset: where; the offset is in bytes, inside the block.
        expected, found: the byte's values.
        count: wrong bytes in the whole request.
    """

    layer: int
    remote_block: int
    local_block: int
    offset: int
    expected: int
    found: int
    count: int


def mix(values: Words) -> Words:
    """The finaliser of SplitMix64: different inputs give different, random-looking outputs."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class Content:
    """The content of a producer's cache."""

    def __init__(self, shape: CacheShape, seed: int) -> None:
        self._shape = shape
        words = shape.block_bytes // WORD_BYTES
        self._group = max(1, _GROUP_BYTES // shape.block_bytes)
        self._table = np.random.default_rng(seed).integers(0, 2**64, words, np.uint64)
        self._seed_key = mix(np.array([seed], np.uint64))
        self._scratch = np.empty((self._group, words), np.uint64)

    def keys(self, layer: int, blocks: npt.NDArray[np.intp], generation: int) -> Words:
        """One key per block."""
        shape = self._shape
        numbers = blocks.astype(np.uint64)
        numbers += np.uint64((generation * shape.layers + layer) * shape.blocks)
        return mix(numbers + self._seed_key)

    def fill(self, cache: Cache, generation: int) -> None:
        """Write a generation into all blocks."""
        blocks = np.arange(self._shape.blocks)
        for layer, words in enumerate(cache.layers):
            keys = self.keys(layer, blocks, generation)
            np.bitwise_xor(keys[:, None], self._table, out=words)

    def spoil(
        self, cache: Cache, local: Sequence[int], remote: Sequence[int], generation: int
    ) -> None:
        """Give every byte of the local blocks the complement of what the transfer has to bring, so
        that no byte is right unless it arrives."""
        for layer, ids, _, keys in self._groups(local, remote, generation):
            scratch = self._scratch[: len(ids)]
            np.bitwise_xor(~keys[:, None], self._table, out=scratch)
            cache.layers[layer][ids] = scratch

    def check(
        self, cache: Cache, local: Sequence[int], remote: Sequence[int], generation: int
    ) -> WrongByte | None:
        """Whether the local blocks hold what the producer wrote into the remote ones."""
        first: WrongByte | None = None
        count = 0
        for layer, ids, remote_ids, keys in self._groups(local, remote, generation):
            scratch = self._scratch[: len(ids)]
            np.take(cache.layers[layer], ids, axis=0, out=scratch, mode="clip")
            np.bitwise_xor(scratch, self._table, out=scratch)
            if (scratch == keys[:, None]).all():
                continue
            found = cache.layers[layer][ids].view(np.uint8)
            expected = np.bitwise_xor(keys[:, None], self._table).view(np.uint8)
            wrong = np.argwhere(found != expected)
            count += len(wrong)
            if first is None:
                row, offset = (int(i) for i in wrong[0])
                first = WrongByte(
                    layer=layer,
                    remote_block=int(remote_ids[row]),
                    local_block=int(ids[row]),
                    offset=offset,
                    expected=int(expected[row, offset]),
                    found=int(found[row, offset]),
                    count=0,
                )
        return None if first is None else replace(first, count=count)

    def _groups(
        self, local: Sequence[int], remote: Sequence[int], generation: int
    ) -> Iterator[tuple[int, npt.NDArray[np.intp], npt.NDArray[np.intp], Words]]:
        """(layer, some of the local blocks, the remote blocks that belong there, their keys)"""
        local_ids = np.asarray(local, np.intp)
        remote_ids = np.asarray(remote, np.intp)
        for layer in range(self._shape.layers):
            keys = self.keys(layer, remote_ids, generation)
            for start in range(0, len(local_ids), self._group):
                part = slice(start, start + self._group)
                yield layer, local_ids[part], remote_ids[part], keys[part]

"""What `kvnixl._descs` computes, written down in NumPy without regard to speed.

The oracles take valid input only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Region = tuple[int, int, int, int, int]  # base, block_len, stride, count, device


def strided_descs(regions: Sequence[Region]) -> npt.NDArray[np.uint64]:
    rows = [
        (base, block_len, device, stride if count > 1 else block_len, count)
        for base, block_len, stride, count, device in regions
    ]
    return np.array(rows, dtype=np.uint64)


def dense_descs(regions: Sequence[Region]) -> npt.NDArray[np.uint64]:
    tables = []
    for base, block_len, stride, count, device in regions:
        table = np.empty((count, 3), np.uint64)
        table[:, 0] = np.uint64(base) + np.arange(count, dtype=np.uint64) * np.uint64(stride)
        table[:, 1] = block_len
        table[:, 2] = device
        tables.append(table)
    return np.concatenate(tables)


def desc_ids(
    regions: Sequence[Region], groups: Sequence[int], block_ids: Sequence[Sequence[int]]
) -> npt.NDArray[np.int64]:
    counts = np.array([region[3] for region in regions], dtype=np.int64)
    first_ids = np.cumsum(counts) - counts
    return np.concatenate(
        [
            first_id + np.asarray(block_ids[group], dtype=np.int64)
            for first_id, group in zip(first_ids, groups, strict=True)
        ]
    )


def num_runs(dst: npt.ArrayLike, src: npt.ArrayLike) -> int:
    dst_steps, src_steps = np.diff(np.asarray(dst, np.int64)), np.diff(np.asarray(src, np.int64))
    return np.size(dst) - int(np.count_nonzero((dst_steps == 1) & (src_steps == 1)))


def runs(
    dst: npt.ArrayLike, src: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], int]:
    """Ordered by destination, unless that makes no fewer runs."""
    dst, src = np.asarray(dst, np.int64), np.asarray(src, np.int64)
    order = np.argsort(dst, kind="stable")
    if num_runs(dst[order], src[order]) < num_runs(dst, src):
        dst, src = dst[order], src[order]
    return dst, src, num_runs(dst, src)


def num_descs(
    dst_regions: Sequence[Region],
    dst_ids: Sequence[int],
    src_regions: Sequence[Region],
    src_ids: Sequence[int],
) -> int:
    """How many descriptors NIXL keeps of these index pairs, given strided prepared lists: it merges
    a pair into the one before where both sides stay in a row and touch in memory."""

    def touches_previous(regions: Sequence[Region], ids: Sequence[int]) -> npt.NDArray[Any]:
        counts = [region[3] for region in regions]
        row = np.repeat(np.arange(len(regions)), counts)[np.asarray(ids, np.int64)]
        descs = dense_descs(regions)[np.asarray(ids, np.int64)]
        ends = descs[:-1, 0] + descs[:-1, 1]
        touches: npt.NDArray[Any] = (ends == descs[1:, 0]) & (row[:-1] == row[1:])
        return touches

    if len(dst_ids) == 0:
        return 0
    merged = touches_previous(dst_regions, dst_ids) & touches_previous(src_regions, src_ids)
    return len(dst_ids) - int(np.count_nonzero(merged))

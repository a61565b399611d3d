"""Who reads which bytes of whom: one rank's plan for reading the KV cache of a remote engine.

`plan_reads` decides once per remote engine, when the peers meet, which of its ranks this rank
reads, and which pieces of their blocks go where in the local blocks (`RankRead`: two tables of
strided regions, ready to be prepared). `ReadPlan.pair_blocks` then turns the block lists of a
request into the block ids for those tables. What cannot be mapped is refused with `TopologyError`
by `plan_reads`; `pair_blocks` refuses only what is wrong with a request's own lists.

Ranks. A tensor-parallel rank stands for the part ``[rank / tp_size, (rank + 1) / tp_size)`` of the
KV heads. A rank deals with the remote ranks whose parts meet its own (`target_ranks`): it notifies
all of them when it is done, and reads each of its heads from the first of them that has it. Where
``tp_size`` exceeds the number of heads, several ranks have the same one; it is read once, and the
readers spread over the ranks that have it. A replicated cache (MLA) is the case of a single head.

Pieces. With equal numbers of heads per rank and equal block sizes a piece is a whole block.
Otherwise it is the longest run of bytes that is contiguous on both sides: the heads that both ranks
have, of the tokens of the smaller block. Each piece becomes one strided region on either side.
Neighbouring pieces of several layers become one, so that storage in which a block of all layers is
contiguous needs one descriptor per block.
"""

from __future__ import annotations

import array
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from kvnixl.errors import BlockListError, TopologyError
from kvnixl.layout import CacheGroup, CacheLayout, MemType, Region, pages

# Tensor-parallel sizes come from requests' parameters; a bound keeps them from costing memory.
MAX_TP_SIZE: Final = 1024
MAX_TARGET_RANKS: Final = 128
"""Ranks of one engine that a rank of another deals with. Each of them has to be loaded."""

# A peer's block sizes decide into how many pieces ours are cut, and how many kernel blocks a block
# id of a request stands for. These bounds are far above what engines use.
MAX_BLOCK_RATIO: Final = 1024
MAX_PIECES: Final = 1 << 16
MAX_KERNEL_IDS: Final = 1 << 22
MAX_REQUEST_DESCS: Final = 1 << 24

# NIXL numbers the descriptors of a prepared list with int32.
_MAX_DESCS: Final = 2**31 - 1

_Ids = npt.NDArray[np.int64]
_BlockIds = Sequence[int] | npt.NDArray[np.integer]


# --- ranks --------------------------------------------------------------------------------------


def target_ranks(tp_rank: int, tp_size: int, remote_tp_size: int) -> range:
    """The remote ranks that ``tp_rank`` handshakes with, reads and notifies.

    Raises:
        TopologyError: a size or the rank is out of range, or the ranks are more than
            `MAX_TARGET_RANKS`.
    """
    _check_rank(tp_rank, tp_size)
    _check_tp_size(remote_tp_size)
    first = tp_rank * remote_tp_size // tp_size
    last = -(-(tp_rank + 1) * remote_tp_size // tp_size)
    if last - first > MAX_TARGET_RANKS:
        raise TopologyError(
            f"tensor-parallel sizes {tp_size} and {remote_tp_size}: rank {tp_rank} would deal with "
            f"{last - first} ranks of the other engine, more than {MAX_TARGET_RANKS}"
        )
    return range(first, last)


def consumer_count(remote_rank: int, remote_tp_size: int, tp_size: int) -> int:
    """How many readers of an engine with ``tp_size`` ranks will notify ``remote_rank``.

    Raises:
        TopologyError: as `target_ranks`.
    """
    return len(target_ranks(remote_rank, remote_tp_size, tp_size))


def heads_of_rank(num_kv_heads: int, tp_rank: int, tp_size: int) -> range:
    """Which of the model's KV heads a rank holds.

    Raises:
        TopologyError: the rank is out of range, or neither of ``num_kv_heads`` and ``tp_size`` is a
            multiple of the other.
    """
    _check_rank(tp_rank, tp_size)
    if num_kv_heads < 1 or (num_kv_heads % tp_size and tp_size % num_kv_heads):
        raise TopologyError(
            f"{num_kv_heads} KV heads cannot be spread over {tp_size} ranks; use a tensor-parallel "
            "size that divides the number of KV heads, or a multiple of it"
        )
    first = tp_rank * num_kv_heads // tp_size
    return range(first, first + max(1, num_kv_heads // tp_size))


def check_parallel_sizes(
    *,
    pp_size: int = 1,
    dcp_size: int = 1,
    pcp_size: int = 1,
    remote_pp_size: int = 1,
    remote_dcp_size: int = 1,
    remote_pcp_size: int = 1,
) -> None:
    """Refuses pipeline and context parallelism, which `plan_reads` does not map.

    Raises:
        TopologyError: a size is not 1 on either side.
    """
    for name, local, remote in (
        ("pipeline-parallel size", pp_size, remote_pp_size),
        ("decode-context-parallel size", dcp_size, remote_dcp_size),
        ("prefill-context-parallel size", pcp_size, remote_pcp_size),
    ):
        if local != 1 or remote != 1:
            raise TopologyError(
                f"{name}: local {local}, remote {remote}; KV transfer needs 1 on both sides"
            )


def _check_tp_size(tp_size: int) -> None:
    if not 1 <= tp_size <= MAX_TP_SIZE:
        raise TopologyError(f"tensor-parallel size {tp_size} is outside 1 .. {MAX_TP_SIZE}")


def _check_rank(tp_rank: int, tp_size: int) -> None:
    _check_tp_size(tp_size)
    if not 0 <= tp_rank < tp_size:
        raise TopologyError(f"rank {tp_rank} does not exist with tensor-parallel size {tp_size}")


# --- what a plan is made of ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnfilledTokens:
    """Tokens of a local block that no read fills: they keep what was in the block before.

    Attributes:
        group: the local cache group.
        block_id: kernel block id.
        start, stop: tokens of the block, ``start <= token < stop``.
    """

    group: int
    block_id: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockPairs:
    """The block lists of one request, paired.

    Attributes:
        local: block ids for the local tables of a plan; `RankRead.select` picks those of a rank.
        remote: block ids for the remote tables; each list is as long as its local one.
        unfilled: what of the local blocks will not be written, because the remote lists end
            earlier (or, in a windowed group, begin later). Zero it if the engine minds.
    """

    local: tuple[npt.NDArray[np.int32], ...]
    remote: tuple[npt.NDArray[np.int32], ...]
    unfilled: tuple[UnfilledTokens, ...] = ()

    @property
    def empty(self) -> bool:
        """Nothing to read (the local prefix cache has all of it): only notify."""
        return all(ids.size == 0 for ids in self.local)


@dataclass(frozen=True, slots=True, eq=False)
class RankRead:
    """What this rank reads of one remote rank.

    Row ``i`` of either table describes the same piece of every block, at its place on that side.
    The tables suit ``kvnixl._descs``: `strided_descs` of each makes a prepared list, and
    `paired_desc_ids` with `RegionIndex` of each makes the index lists of a request.

    Attributes:
        remote_rank: the remote tensor-parallel rank.
        local_rows, remote_rows: uint64, shape ``(pieces, 5)``, columns ``(base, length, stride,
            count, device)``; lengths are equal row by row.
        row_groups: for each row the number of its block list, counted from 0 without gaps.
        block_lists: for each of those numbers the index into `BlockPairs.local` and ``remote``.
        local_mem_type, remote_mem_type: memory of each table.
    """

    remote_rank: int
    local_rows: npt.NDArray[np.uint64]
    remote_rows: npt.NDArray[np.uint64]
    row_groups: tuple[int, ...]
    block_lists: tuple[int, ...]
    local_mem_type: MemType
    remote_mem_type: MemType

    def select(
        self, pairs: BlockPairs
    ) -> tuple[tuple[npt.NDArray[np.int32], ...], tuple[npt.NDArray[np.int32], ...]]:
        """The local and the remote block ids of a request, one array for each number in
        ``row_groups``."""
        return (
            tuple(pairs.local[i] for i in self.block_lists),
            tuple(pairs.remote[i] for i in self.block_lists),
        )

    def num_descs(self, pairs: BlockPairs) -> int:
        """Descriptors that a request reads from this rank, before neighbours are merged."""
        rows = Counter(self.row_groups)
        return sum(rows[number] * pairs.local[i].size for number, i in enumerate(self.block_lists))

    def check_num_descs(self, pairs: BlockPairs) -> None:
        """
        Raises:
            BlockListError: a request reads more than `MAX_REQUEST_DESCS` from this rank.
        """
        longest = max((pairs.local[i].size for i in self.block_lists), default=0)
        if len(self.row_groups) * longest <= MAX_REQUEST_DESCS:
            return
        descs = self.num_descs(pairs)
        if descs > MAX_REQUEST_DESCS:
            raise BlockListError(
                f"the blocks of the request are cut into {descs} pieces (rank {self.remote_rank}), "
                f"more than {MAX_REQUEST_DESCS}; use larger blocks, or equal block sizes on both "
                f"sides"
            )

    def num_bytes(self, pairs: BlockPairs) -> int:
        """Bytes that a request reads from this rank."""
        lengths = self.local_rows[:, 1].tolist()
        return sum(
            length * pairs.local[self.block_lists[number]].size
            for length, number in zip(lengths, self.row_groups, strict=True)
        )


@dataclass(frozen=True, slots=True)
class _BlockList:
    """How one list of `BlockPairs` comes from the block lists of a request: from those of one
    cache group on either side, or of several one after the other where these share a region.

    ``local_split`` and ``remote_split``: how many entries of its table a kernel block has. With a
    ``phase``, the list has only every ``n``-th part of the sequence, beginning with that one, where
    ``n`` smaller blocks make a larger one: the part at that place in the larger block.
    """

    local_groups: tuple[int, ...]
    remote_groups: tuple[int, ...]
    local_split: int = 1
    remote_split: int = 1
    phase: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ReadPlan:
    """How one rank reads a remote engine. Made by `plan_reads`.

    Attributes:
        reads: one for each remote rank that is read, in order of the ranks.
        notify_ranks: target ranks that are not read and only have to be notified.
        consumers: for each target rank, how many readers notify it.
        local, remote: the layout of this rank, and of the first remote rank that is read.
    """

    reads: tuple[RankRead, ...]
    notify_ranks: tuple[int, ...]
    consumers: Mapping[int, int]
    local: CacheLayout = field(repr=False)
    remote: CacheLayout = field(repr=False)
    _lists: tuple[_BlockList, ...] = field(repr=False)
    _num_local_blocks: tuple[int, ...] = field(repr=False)
    _num_remote_blocks: tuple[int, ...] = field(repr=False)

    @property
    def ranks(self) -> tuple[int, ...]:
        """All target ranks: those that are read and those that are only notified."""
        return tuple(self.consumers)

    def num_bytes(self, pairs: BlockPairs) -> int:
        """Bytes that a request reads, from all ranks."""
        return sum(read.num_bytes(pairs) for read in self.reads)

    def pair_blocks(
        self,
        local_block_ids: Sequence[_BlockIds],
        remote_block_ids: Sequence[_BlockIds],
        *,
        num_computed_blocks: Sequence[int] | None = None,
        num_tokens: int | None = None,
        needed_tokens: int | None = None,
    ) -> BlockPairs:
        """Pairs the blocks of one request.

        Args:
            local_block_ids: for each local cache group the logical blocks to fill, in the order of
                the sequence, without those that the local prefix cache has. Empty, or empty for
                each group: nothing to read.
            remote_block_ids: for each remote cache group the logical blocks of the whole sequence,
                or of its end if the group has a sliding window. Extra blocks at the end are fine
                if one of the following two is given.
            num_computed_blocks: for each local cache group how many logical blocks of the sequence
                come before the list. It fixes where the local lists begin. (Not read for windowed
                groups, where blocks out of the window are not counted by everyone.)
            num_tokens: tokens that the remote blocks hold. Without ``num_computed_blocks`` the
                local lists are taken to end with the same token.
            needed_tokens: tokens that the local side goes on from; by default all that the remote
                blocks hold. It tells where the windows must begin.

        With neither of ``num_computed_blocks`` and ``num_tokens`` the lists are taken to end
        together, so that a local prefix hit pairs with the end of the remote list.

        Raises:
            BlockListError: an id is out of range, the remote lists do not cover what is asked for,
                or the position of the lists is ambiguous (different block sizes and neither
                ``num_computed_blocks`` nor ``num_tokens``).
        """
        if not any(len(ids) for ids in local_block_ids):
            nothing = tuple(np.empty(0, np.int32) for _ in self._lists)
            return BlockPairs(nothing, nothing)
        request = _Request(
            local=_Side("local", self.local, self._num_local_blocks, local_block_ids),
            remote=_Side("remote", self.remote, self._num_remote_blocks, remote_block_ids),
            num_computed_blocks=_checked_computed(num_computed_blocks, self.local),
            num_tokens=_checked_tokens(num_tokens),
            needed_tokens=needed_tokens,
        )
        spans: dict[tuple[int, int], _Span] = {}
        local_lists, remote_lists = [], []
        for block_list in self._lists:
            chosen = []
            for groups in self._group_pairs(block_list):
                span = spans.get(groups)
                if span is None:
                    span = spans[groups] = request.span(*groups)
                chosen.append(span.block_ids(block_list))
            local_lists.append(_joined(local for local, _ in chosen))
            remote_lists.append(_joined(remote for _, remote in chosen))
        unfilled = [part for span in spans.values() for part in span.unfilled()]
        return BlockPairs(tuple(local_lists), tuple(remote_lists), tuple(unfilled))

    def _group_pairs(self, block_list: _BlockList) -> Iterable[tuple[int, int]]:
        """The cache groups, local and remote, that feed a list of block ids."""
        return zip(block_list.local_groups, block_list.remote_groups, strict=True)

    def __str__(self) -> str:
        rows = [("rank", "pieces", "piece bytes", "consumers")]
        by_rank = {read.remote_rank: read for read in self.reads}
        for rank, count in self.consumers.items():
            read = by_rank.get(rank)
            if read is None:
                rows.append((str(rank), "-", "only notified", str(count)))
                continue
            lengths = sorted(set(read.local_rows[:, 1].tolist()))
            shown = str(lengths[0]) if len(lengths) == 1 else f"{lengths[0]} .. {lengths[-1]}"
            rows.append((str(rank), str(len(read.local_rows)), shown, str(count)))
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )


# --- planning -----------------------------------------------------------------------------------


def plan_reads(
    local: CacheLayout,
    remote: Mapping[int, CacheLayout],
    *,
    tp_rank: int,
    tp_size: int,
    remote_tp_size: int,
) -> ReadPlan:
    """The plan by which rank ``tp_rank`` reads a remote engine.

    Args:
        local: layout of this rank.
        remote: the remote ranks' layouts by rank; those of `target_ranks` must be there.
        tp_rank, tp_size: this rank, and how many its engine has.
        remote_tp_size: how many ranks the remote engine has.

    Raises:
        TopologyError: the two caches cannot be mapped onto each other. The message names both
            sides' values and what to change.
    """
    targets = target_ranks(tp_rank, tp_size, remote_tp_size)
    missing = [rank for rank in targets if rank not in remote]
    if missing:
        raise TopologyError(
            f"rank {tp_rank} of {tp_size} reads ranks {list(targets)} of {remote_tp_size}, but no "
            f"layout of rank {missing[0]} was given"
        )
    for rank in targets:
        _check_layouts(local, remote[rank], rank)
        _check_same_engine(remote[targets[0]], remote[rank], targets[0], rank)
    planner = _Planner(local, tp_rank, tp_size, remote_tp_size)
    reads = [
        read for rank in targets if (read := planner.read_rank(rank, remote[rank])) is not None
    ]
    read_ranks = {read.remote_rank for read in reads}
    first = remote[reads[0].remote_rank]
    return ReadPlan(
        reads=tuple(reads),
        notify_ranks=tuple(rank for rank in targets if rank not in read_ranks),
        consumers={rank: consumer_count(rank, remote_tp_size, tp_size) for rank in targets},
        local=local,
        remote=first,
        _lists=tuple(planner.lists),
        _num_local_blocks=_blocks_per_group(local),
        _num_remote_blocks=tuple(
            map(min, zip(*(_blocks_per_group(remote[rank]) for rank in read_ranks), strict=True))
        ),
    )


def _blocks_per_group(layout: CacheLayout) -> tuple[int, ...]:
    """`CacheLayout.num_blocks` of all groups. A peer may claim a group for each of its regions, so
    the regions are gone through once."""
    counts: dict[int, int] = {}
    for region in layout.regions:
        for group in region.groups:
            counts[group] = min(counts.get(group, region.num_blocks), region.num_blocks)
    groups = range(len(layout.groups))
    return tuple(counts.get(group, 0) // layout.kernel_blocks_per_block for group in groups)


def _check_layouts(local: CacheLayout, remote: CacheLayout, rank: int) -> None:
    """What concerns the layouts as wholes."""
    kernel_blocks = local.kernel_blocks_per_block, remote.kernel_blocks_per_block
    if max(kernel_blocks) > MAX_BLOCK_RATIO:
        raise TopologyError(
            f"kernel blocks per block: local {kernel_blocks[0]}, remote {kernel_blocks[1]} (rank "
            f"{rank}); at most {MAX_BLOCK_RATIO} are supported"
        )
    if local.attn_backend and remote.attn_backend and local.attn_backend != remote.attn_backend:
        raise TopologyError(
            f"attention backend: local {local.attn_backend!r}, remote {remote.attn_backend!r} "
            f"(rank {rank}); they may pack blocks differently, so select the same on both sides"
        )
    if local.packing and remote.packing and local.packing != remote.packing:
        raise TopologyError(
            f"packing of the cache inside a block: local {local.packing!r}, remote "
            f"{remote.packing!r} (rank {rank}); run both sides on the same kind of CPU"
        )
    sharded = any(not region.replicated for layout in (local, remote) for region in layout.regions)
    if sharded and local.head_major != remote.head_major:
        raise TopologyError(
            f"KV cache layout: local {local.kv_layout}, remote {remote.kv_layout} (rank {rank}); "
            "use the same on both sides (HND also allows different tensor-parallel sizes)"
        )


def _check_same_engine(first: CacheLayout, other: CacheLayout, rank: int, other_rank: int) -> None:
    """The block lists of a request count for all ranks alike."""
    for what, a, b in (
        ("cache groups", first.groups, other.groups),
        ("kernel blocks per block", first.kernel_blocks_per_block, other.kernel_blocks_per_block),
    ):
        if a != b:
            raise TopologyError(
                f"ranks of the remote engine differ in {what}: rank {rank} has {a!r:.200}, rank "
                f"{other_rank} has {b!r:.200}"
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A run of bytes of every block that is contiguous on both sides. Offsets are from the blocks'
    starts; ``step`` is from one token range of the larger block to the next."""

    local_offset: int
    remote_offset: int
    length: int
    step: int = 0


@dataclass(frozen=True, slots=True)
class _Row:
    """A strided region: ``(base, length, stride, count, device)``."""

    base: int
    length: int
    stride: int
    count: int
    device: int

    @classmethod
    def of(cls, region: Region, offset: int, length: int) -> _Row:
        """A piece of each block of a region."""
        return cls(
            region.base + offset,
            length,
            region.block_stride,
            region.num_blocks,
            region.device_id,
        )

    def moved(self, offset: int) -> _Row:
        return replace(self, base=self.base + offset)

    def split(self, parts: int) -> _Row:
        """Blocks of ``parts`` pieces without gaps, counted piece by piece."""
        if parts == 1:
            return self
        return replace(self, stride=self.length, count=self.count * parts)

    def followed_by(self, other: _Row, length: int) -> bool:
        """Whether ``other`` begins, in each block, where this row's piece ends. Blocks of one row
        that lie around those of the other show that both are in one allocation."""
        return (
            self.base + self.length == other.base
            and self.count > 1
            and length <= self.stride
            and (self.stride, self.count, self.device) == (other.stride, other.count, other.device)
        )

    @property
    def cells(self) -> tuple[int, int, int, int, int]:
        return (self.base, self.length, self.stride, self.count, self.device)


class _Planner:
    """Collects the pieces of each remote rank, and the block lists that they need."""

    def __init__(self, local: CacheLayout, tp_rank: int, tp_size: int, remote_tp_size: int) -> None:
        self._local = local
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._remote_tp_size = remote_tp_size
        self._list_numbers: dict[_BlockList, int] = {}
        self._num_pieces = 0
        self._heads: dict[tuple[int, int], tuple[range, range, range]] = {}

    @property
    def lists(self) -> Iterable[_BlockList]:
        return self._list_numbers

    def read_rank(self, rank: int, remote: CacheLayout) -> RankRead | None:
        """What is read of a remote rank, ``None`` if it has nothing that another does not have."""
        rows: list[tuple[int, _Row, _Row]] = []
        newest: dict[int, int] = {}  # list number -> position of its newest entry in rows
        mem_types: set[tuple[MemType, MemType]] = set()
        for name, local_page, remote_page in _paired_pages(self._local, remote, rank):
            page = self._page_pair(name, local_page, remote_page, rank, remote)
            for block_list, local_row, remote_row in page.rows():
                self._count_piece(page)
                number = self._list_numbers.setdefault(block_list, len(self._list_numbers))
                mem_types.add((local_page.mem_type, remote_page.mem_type))
                if number in newest:
                    position = newest[number]
                    _, last_local, last_remote = rows[position]
                    length = last_local.length + local_row.length
                    if last_local.followed_by(local_row, length) and last_remote.followed_by(
                        remote_row, length
                    ):
                        joined = (
                            replace(last_local, length=length),
                            replace(last_remote, length=length),
                        )
                        rows[position] = (number, *joined)
                        continue
                newest[number] = len(rows)
                rows.append((number, local_row, remote_row))
        if not rows:
            return None
        if len(mem_types) > 1:
            raise TopologyError(
                "regions in different kinds of memory cannot be read together: (local, remote) are "
                f"{', '.join(map(str, sorted(mem_types)))} (rank {rank})"
            )
        for side, descs in (
            ("local", sum(row.count for _, row, _ in rows)),
            ("remote", sum(row.count for _, _, row in rows)),
        ):
            if descs > _MAX_DESCS:
                raise TopologyError(
                    f"{side} blocks are cut into {descs} pieces (rank {rank}); NIXL numbers at "
                    f"most {_MAX_DESCS}"
                )
        ((local_mem_type, remote_mem_type),) = mem_types
        positions = {number: position for position, number in enumerate(newest)}
        return RankRead(
            remote_rank=rank,
            local_rows=_table(row for _, row, _ in rows),
            remote_rows=_table(row for _, _, row in rows),
            row_groups=tuple(positions[number] for number, _, _ in rows),
            block_lists=tuple(newest),
            local_mem_type=local_mem_type,
            remote_mem_type=remote_mem_type,
        )

    def _count_piece(self, page: _PagePair) -> None:
        self._num_pieces += 1
        if self._num_pieces > MAX_PIECES:
            raise TopologyError(
                f"{page.where}: with blocks of {page.local_tokens} tokens here and "
                f"{page.remote_tokens} there, and tensor-parallel sizes {self._tp_size} and "
                f"{self._remote_tp_size}, blocks are cut into more than {MAX_PIECES} pieces; use "
                "equal block and tensor-parallel sizes on both sides"
            )

    def _page_pair(
        self, name: str, local: Region, remote: Region, rank: int, remote_layout: CacheLayout
    ) -> _PagePair:
        where = f"{name} (rank {rank})"
        _check_kinds(where, local, remote)
        local_tokens, remote_tokens = _block_tokens(
            where, (self._local, local), (remote_layout, remote)
        )
        key = (local.distinct_heads, rank)
        if key not in self._heads:
            self._heads[key] = self._shared_heads(*key)
        local_heads, remote_heads, read_heads = self._heads[key]
        pair = _PagePair(
            where=where,
            local=local,
            remote=remote,
            local_heads=local_heads,
            remote_heads=remote_heads,
            read_heads=read_heads,
            local_tokens=local_tokens,
            remote_tokens=remote_tokens,
            head_major=self._local.head_major,
        )
        if len(pair.local_heads) != len(pair.remote_heads) and not pair.head_major:
            raise TopologyError(
                f"{where}: tensor-parallel size: local {self._tp_size}, remote "
                f"{self._remote_tp_size}, so {len(pair.local_heads)} and {len(pair.remote_heads)} "
                f"KV heads per rank, which layout {self._local.kv_layout} does not keep apart; use "
                "HND or equal tensor-parallel sizes"
            )
        pair.check_lengths()
        return pair

    def _shared_heads(self, num_kv_heads: int, rank: int) -> tuple[range, range, range]:
        """The heads of this rank, those of a remote rank, and those to read from it: the ones of
        both that no earlier target rank has."""
        local = heads_of_rank(num_kv_heads, self._tp_rank, self._tp_size)
        remote = heads_of_rank(num_kv_heads, rank, self._remote_tp_size)
        start = max(local.start, remote.start)
        if rank > target_ranks(self._tp_rank, self._tp_size, self._remote_tp_size).start:
            start = max(start, heads_of_rank(num_kv_heads, rank - 1, self._remote_tp_size).stop)
        return local, remote, range(start, max(start, min(local.stop, remote.stop)))


def _table(rows: Iterable[_Row]) -> npt.NDArray[np.uint64]:
    table = np.array([row.cells for row in rows], dtype=np.uint64)
    table.setflags(write=False)
    return table


def _paired_pages(
    local: CacheLayout, remote: CacheLayout, rank: int
) -> Iterator[tuple[str, Region, Region]]:
    """The pages of both sides that hold the same: by layer name where both have names, else by
    position. K and V segments of one layer pair in order."""
    local_pages, remote_pages = list(pages(local)), list(pages(remote))
    named = all(name for name, _ in local_pages) and all(name for name, _ in remote_pages)
    if len(local_pages) != len(remote_pages):
        differing = {name for name, _ in local_pages} ^ {name for name, _ in remote_pages}
        example = f" ({min(differing)!r} is on one side only)" if named and differing else ""
        raise TopologyError(
            f"number of KV cache regions: local {len(local_pages)}, remote {len(remote_pages)} "
            f"(rank {rank}){example}; both sides must hold the same layers"
        )
    if not named:
        for i, ((_, mine), (_, theirs)) in enumerate(zip(local_pages, remote_pages, strict=True)):
            yield f"region {i}", mine, theirs
        return
    by_name: dict[str, list[Region]] = {}
    for name, page in reversed(remote_pages):
        by_name.setdefault(name, []).append(page)
    for name, page in local_pages:
        candidates = by_name.get(name)
        if not candidates:
            raise TopologyError(
                f"layer {name!r} has more KV cache regions here than on the remote side (rank "
                f"{rank}); both sides must hold the same layers in the same regions"
            )
        yield f"layer {name!r}", page, candidates.pop()


def _check_kinds(where: str, local: Region, remote: Region) -> None:
    for what, mine, theirs in (
        ("replicated on every rank", local.replicated, remote.replicated),
        ("KV heads of the model", local.distinct_heads, remote.distinct_heads),
        ("planes in a block", local.planes, remote.planes),
        ("number of cache groups in it", len(local.groups), len(remote.groups)),
    ):
        if mine != theirs:
            raise TopologyError(
                f"{where}: {what}: local {mine}, remote {theirs}; run the same model with the same "
                "cache configuration on both sides"
            )


def _block_tokens(
    where: str, local: tuple[CacheLayout, Region], remote: tuple[CacheLayout, Region]
) -> tuple[int, int]:
    """Tokens of a kernel block on either side."""
    mine, theirs = _groups_of(*local), _groups_of(*remote)
    windows = [group.sliding_window for group in mine], [group.sliding_window for group in theirs]
    if windows[0] != windows[1]:
        raise TopologyError(
            f"{where}: sliding windows of the cache groups: local {windows[0]}, remote "
            f"{windows[1]}; run the same model on both sides"
        )
    sizes = [group.block_size for group in mine], [group.block_size for group in theirs]
    if sizes[0] == sizes[1]:
        return sizes[0][0], sizes[1][0]
    if len(set(sizes[0])) > 1 or len(set(sizes[1])) > 1:
        raise TopologyError(
            f"{where}: tokens per block of the cache groups that share it: local {sizes[0]}, "
            f"remote {sizes[1]}; use equal block sizes on both sides"
        )
    tokens = sizes[0][0], sizes[1][0]
    if max(tokens) % min(tokens):
        raise TopologyError(
            f"{where}: tokens per block: local {tokens[0]}, remote {tokens[1]}; use equal block "
            "sizes, or one that is a multiple of the other"
        )
    if max(tokens) // min(tokens) > MAX_BLOCK_RATIO:
        raise TopologyError(
            f"{where}: tokens per block: local {tokens[0]}, remote {tokens[1]}; one may be at most "
            f"{MAX_BLOCK_RATIO} times the other"
        )
    if not (local[0].token_granular and remote[0].token_granular):
        backend = local[0].attn_backend or remote[0].attn_backend or "in use"
        raise TopologyError(
            f"{where}: tokens per block: local {tokens[0]}, remote {tokens[1]}; attention backend "
            f"{backend} packs the tokens of a block together, so use equal block sizes"
        )
    return tokens


def _groups_of(layout: CacheLayout, region: Region) -> tuple[CacheGroup, ...]:
    return tuple(layout.groups[number] for number in region.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PagePair:
    """One layer's page, here and at a remote rank, and what of it is read."""

    where: str
    local: Region
    remote: Region
    local_heads: range
    remote_heads: range
    read_heads: range
    local_tokens: int
    remote_tokens: int
    head_major: bool

    @property
    def whole_blocks(self) -> bool:
        return (
            len(self.local_heads) == len(self.remote_heads)
            and self.local_tokens == self.remote_tokens
        )

    def check_lengths(self) -> None:
        local_units = len(self.local_heads) * self.local_tokens
        remote_units = len(self.remote_heads) * self.remote_tokens
        # Multiplied crosswise: a whole block may have bytes that belong to no single token.
        if self.local.block_len * remote_units != self.remote.block_len * local_units:
            raise TopologyError(
                f"{self.where}: bytes per block: local {self.local.block_len} for "
                f"{len(self.local_heads)} heads of {self.local_tokens} tokens, remote "
                f"{self.remote.block_len} for {len(self.remote_heads)} heads of "
                f"{self.remote_tokens} tokens; use the same KV cache dtype and head size"
            )
        parts = self.local.planes * len(self.local_heads) * self._token_units()[0]
        if not self.whole_blocks and self.local.block_len % parts:
            raise TopologyError(
                f"{self.where}: the local block of {self.local.block_len} bytes cannot be cut into "
                f"{parts} equal parts; use equal tensor-parallel and block sizes on both sides"
            )

    def _token_units(self) -> tuple[int, int, int]:
        """Parts of a head along the tokens: in a local block, in a remote one, in a piece."""
        if self.local_tokens == self.remote_tokens:
            return 1, 1, 1
        return self.local_tokens, self.remote_tokens, min(self.local_tokens, self.remote_tokens)

    def pieces(self) -> Iterator[_Piece]:
        if not self.read_heads:
            return
        if self.whole_blocks:
            yield _Piece(0, 0, self.local.block_len)
            return
        local_heads, remote_heads = len(self.local_heads), len(self.remote_heads)
        local_tokens, remote_tokens, tokens = self._token_units()
        unit = self.local.block_len // (self.local.planes * local_heads * local_tokens)
        # Axes from the outermost in: (length, local step, remote step).
        planes = (
            self.local.planes,
            local_heads * local_tokens * unit,
            remote_heads * remote_tokens * unit,
        )
        if self.head_major:
            heads = (len(self.read_heads), local_tokens * unit, remote_tokens * unit)
            inner = (tokens, unit, unit)
            axes = (planes, heads, inner)
        else:
            heads = (len(self.read_heads), unit, unit)
            inner = (tokens, local_heads * unit, remote_heads * unit)
            axes = (planes, inner, heads)
        length = unit
        loops: list[tuple[int, int, int]] = []
        for size, local_step, remote_step in reversed(axes):
            if size == 1:
                continue
            if not loops and local_step == remote_step == length:
                length *= size
            else:
                loops.append((size, local_step, remote_step))
        local_start = (self.read_heads.start - self.local_heads.start) * heads[1]
        remote_start = (self.read_heads.start - self.remote_heads.start) * heads[2]
        for index in itertools.product(*(range(size) for size, _, _ in reversed(loops))):
            steps = list(zip(index, reversed(loops), strict=True))
            yield _Piece(
                local_start + sum(i * step for i, (_, step, _) in steps),
                remote_start + sum(i * step for i, (_, _, step) in steps),
                length,
                inner[0] * inner[1],
            )

    def rows(self) -> Iterator[tuple[_BlockList, _Row, _Row]]:
        """The strided regions on both sides, and the block ids that address them."""
        groups = (self.local.groups, self.remote.groups)
        local_split = max(1, self.local_tokens // self.remote_tokens)
        remote_split = max(1, self.remote_tokens // self.local_tokens)
        for piece in self.pieces():
            local = _Row.of(self.local, piece.local_offset, piece.length)
            remote = _Row.of(self.remote, piece.remote_offset, piece.length)
            if local_split == remote_split == 1:
                yield _BlockList(*groups), local, remote
                continue
            larger, split = (
                (self.local, local_split) if local_split > 1 else (self.remote, remote_split)
            )
            if larger.block_stride == split * piece.length:
                # The parts of the larger block follow each other without gaps, so that they can
                # be counted through as one region, and neighbours be merged.
                yield (
                    _BlockList(*groups, local_split, remote_split),
                    local.split(local_split),
                    remote.split(remote_split),
                )
                continue
            for phase in range(split):
                yield (
                    _BlockList(*groups, phase=phase),
                    local.moved(phase * piece.step) if local_split > 1 else local,
                    remote.moved(phase * piece.step) if remote_split > 1 else remote,
                )


# --- pairing the blocks of a request ------------------------------------------------------------


class _Side:
    """The block lists of one side of a request."""

    def __init__(
        self,
        name: str,
        layout: CacheLayout,
        num_blocks: Sequence[int],
        block_ids: Sequence[_BlockIds],
    ) -> None:
        try:
            lists = list(block_ids)
            self.lengths = [len(ids) for ids in lists]
        except TypeError:
            raise BlockListError(
                f"{name} block ids must be one list for each cache group, not {block_ids!r:.80}"
            ) from None
        if len(self.lengths) != len(layout.groups):
            raise BlockListError(
                f"{name} block ids are {len(self.lengths)} lists, but the {name} cache has "
                f"{len(layout.groups)} groups; pass one list for each"
            )
        self.name = name
        self.layout = layout
        self._num_blocks = num_blocks
        self._block_ids = lists
        self._kernel_ids: dict[int, _Ids] = {}
        listed = sum(self.lengths) * layout.kernel_blocks_per_block
        if listed > MAX_KERNEL_IDS:
            raise BlockListError(
                f"{name} block ids are {sum(self.lengths)} blocks of "
                f"{layout.kernel_blocks_per_block} kernel blocks each; a request may name at most "
                f"{MAX_KERNEL_IDS} kernel blocks"
            )

    def tokens_per_block(self, group: int) -> int:
        """Tokens of a logical block."""
        return self.layout.groups[group].block_size * self.layout.kernel_blocks_per_block

    def tokens(self, group: int) -> int:
        """Tokens that the group's list has room for."""
        return self.lengths[group] * self.tokens_per_block(group)

    def full_group_like(self, group: int) -> int | None:
        """A group without a window whose blocks hold as many tokens, if it exists. Its list tells
        how many blocks the sequence has."""
        for other, candidate in enumerate(self.layout.groups):
            if (
                candidate.sliding_window == 0
                and candidate.block_size == self.layout.groups[group].block_size
            ):
                return other
        return None

    def kernel_ids(self, group: int) -> _Ids:
        """The checked block ids of a group, as kernel blocks."""
        # Several groups of the other side may pair with this one.
        ids = self._kernel_ids.get(group)
        if ids is None:
            ids = self._kernel_ids[group] = self._checked_ids(group)
        return ids

    def _checked_ids(self, group: int) -> _Ids:
        given = self._block_ids[group]
        try:
            if isinstance(given, list):
                ids = np.frombuffer(array.array("q", given), np.int64)
            else:
                ids = np.asarray(given) if len(given) else np.empty(0, np.int64)
        except (ValueError, TypeError, OverflowError) as error:
            raise BlockListError(
                f"{self.name} block ids of group {group} are no list of integers: {error}"
            ) from None
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise BlockListError(
                f"{self.name} block ids of group {group} must be a list of integers, not "
                f"{ids.ndim}-dimensional {ids.dtype}"
            )
        signed = ids.astype(np.int64, copy=False)
        if not ids.size:
            return signed
        limit = self._num_blocks[group]
        # One pass: seen as unsigned, a negative id is too large as well.
        if int(signed.view(np.uint64).max()) >= limit:
            wrong = next(int(i) for i in ids if not 0 <= int(i) < limit)
            raise BlockListError(
                f"{self.name} block {wrong} of group {group} does not exist; the {self.name} cache "
                f"has {limit} blocks"
            )
        parts = self.layout.kernel_blocks_per_block
        if parts == 1:
            return signed
        return (signed[:, None] * parts + np.arange(parts)).ravel()


@dataclass(slots=True, eq=False)  # not frozen: that doubles what making one costs
class _Span:
    """One cache group of a request: where its block lists stand in the sequence.

    Positions are in tokens. The tokens from ``start`` to ``stop`` are read; the local blocks
    stand for those from ``local_start`` to ``local_stop``.
    """

    group: int
    local_ids: _Ids
    remote_ids: _Ids
    local_tokens: int
    remote_tokens: int
    local_start: int
    local_stop: int
    remote_start: int
    start: int
    stop: int

    def block_ids(
        self, block_list: _BlockList
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        unit = min(self.local_tokens, self.remote_tokens)
        local_parts = self.local_tokens // unit
        remote_parts = self.remote_tokens // unit
        first, last = self.start // unit, self.stop // unit
        local_first = self.local_start // self.local_tokens
        remote_first = self.remote_start // self.remote_tokens
        if local_parts == remote_parts == 1:
            local = self.local_ids[first - local_first : last - local_first]
            remote = self.remote_ids[first - remote_first : last - remote_first]
            return local.astype(np.int32), remote.astype(np.int32)
        step = 1
        if block_list.phase is not None:
            step = local_parts * remote_parts
            first += (block_list.phase - first) % step
        parts = np.arange(first, last, step)
        local = self.local_ids[parts // local_parts - local_first]
        remote = self.remote_ids[parts // remote_parts - remote_first]
        if block_list.local_split > 1:
            local = local * local_parts + parts % local_parts
        if block_list.remote_split > 1:
            remote = remote * remote_parts + parts % remote_parts
        return local.astype(np.int32), remote.astype(np.int32)

    def unfilled(self) -> Iterator[UnfilledTokens]:
        size = self.local_tokens
        for begin, end in ((self.local_start, self.start), (self.stop, self.local_stop)):
            for block in range((begin - self.local_start) // size, len(self.local_ids)):
                first = self.local_start + block * size
                start, stop = max(begin - first, 0), min(end - first, size)
                if start >= stop:
                    break
                yield UnfilledTokens(self.group, int(self.local_ids[block]), start, stop)


@dataclass(slots=True, eq=False)
class _Request:
    """The block lists of a request, and what is known of their place in the sequence."""

    local: _Side
    remote: _Side
    num_computed_blocks: Sequence[int] | None
    num_tokens: int | None
    needed_tokens: int | None

    def span(self, local_group: int, remote_group: int) -> _Span:
        local_ids = self.local.kernel_ids(local_group)
        remote_ids = self.remote.kernel_ids(remote_group)
        local_start = local_stop = remote_start = start = stop = 0
        if local_ids.size:
            windowed = self.local.layout.groups[local_group].sliding_window > 0
            ends = self._window_ends if windowed else self._full_ends
            local_stop, remote_stop = ends(local_group, remote_group)
            local_start = local_stop - self.local.tokens(local_group)
            # A list with room for more than the sequence begins with it and has extra blocks.
            remote_start = max(0, remote_stop - self.remote.tokens(remote_group))
            start, stop = self._overlap(
                local_group, remote_group, local_start, local_stop, remote_start
            )
        return _Span(
            group=local_group,
            local_ids=local_ids,
            remote_ids=remote_ids,
            local_tokens=self.local.layout.groups[local_group].block_size,
            remote_tokens=self.remote.layout.groups[remote_group].block_size,
            local_start=local_start,
            local_stop=local_stop,
            remote_start=remote_start,
            start=start,
            stop=stop,
        )

    def _full_ends(self, local_group: int, remote_group: int) -> tuple[int, int]:
        """Where the lists of a group end. The remote list begins with the sequence."""
        local_tokens = self.local.tokens_per_block(local_group)
        listed = self.local.tokens(local_group)
        remote_stop = self.remote.tokens(remote_group)
        if self.num_computed_blocks is not None:
            return self.num_computed_blocks[local_group] * local_tokens + listed, remote_stop
        if self.num_tokens is not None:
            return _round_up(self.num_tokens, local_tokens), remote_stop
        # Lists that are equally long at either side's block size can have no prefix hit.
        if (
            local_tokens == self.remote.tokens_per_block(remote_group)
            or _round_up(remote_stop, local_tokens) == listed
        ):
            return _round_up(remote_stop, local_tokens), remote_stop
        raise self._ambiguous(local_group, remote_group)

    def _window_ends(self, local_group: int, remote_group: int) -> tuple[int, int]:
        """Where the lists of a windowed group end. Both hold only the end of the sequence, so a
        group without a window tells best how long that is."""
        local_stop = remote_stop = None
        full = self.local.full_group_like(local_group)
        if full is not None and self.num_computed_blocks is not None:
            computed = self.num_computed_blocks[full] * self.local.tokens_per_block(full)
            local_stop = computed + self.local.tokens(full)
        elif self.num_tokens is not None:
            local_stop = _round_up(self.num_tokens, self.local.tokens_per_block(local_group))
        full = self.remote.full_group_like(remote_group)
        if full is not None:
            remote_stop = self.remote.tokens(full)
        elif self.num_tokens is not None:
            remote_stop = _round_up(self.num_tokens, self.remote.tokens_per_block(remote_group))
        if local_stop is not None and remote_stop is not None:
            return local_stop, remote_stop
        if self.local.tokens_per_block(local_group) != self.remote.tokens_per_block(remote_group):
            raise self._ambiguous(local_group, remote_group)
        for stop in (local_stop, remote_stop):
            if stop is not None:
                return stop, stop
        stop = max(self.local.tokens(local_group), self.remote.tokens(remote_group))
        return stop, stop

    def _overlap(
        self,
        local_group: int,
        remote_group: int,
        local_start: int,
        local_stop: int,
        remote_start: int,
    ) -> tuple[int, int]:
        """Which tokens to read. Refuses lists that do not cover what is asked for."""
        local_tokens = self.local.tokens_per_block(local_group)
        remote_stop = remote_start + self.remote.tokens(remote_group)
        held = remote_stop if self.num_tokens is None else self.num_tokens
        if local_start < 0 or local_stop - local_tokens >= held:
            raise BlockListError(
                f"group {local_group}: {self.local.lengths[local_group]} local blocks of "
                f"{local_tokens} tokens, to end at token {local_stop}, are more than the remote "
                f"engine's {held} tokens need; ask only for blocks that it has"
            )
        wanted = min(held, local_stop)
        if remote_stop < wanted:
            raise BlockListError(
                f"group {local_group}: the remote engine lists "
                f"{self.remote.lengths[remote_group]} blocks of "
                f"{self.remote.tokens_per_block(remote_group)} tokens, which end at token "
                f"{remote_stop}, but the local blocks are to hold {wanted}"
            )
        start = max(local_start, remote_start)
        window = self.local.layout.groups[local_group].sliding_window
        goes_on = wanted if self.needed_tokens is None else min(wanted, self.needed_tokens)
        # The next token attends to itself and to the window - 1 tokens before it.
        needed = max(local_start, goes_on - window + 1) if window else local_start
        if start > needed:
            raise BlockListError(
                f"group {local_group}: the remote engine lists blocks from token {remote_start} "
                f"on, but the local blocks need token {needed} of a window of {window}"
            )
        held_stop = _round_up(held, self.remote.tokens_per_block(remote_group))
        return start, min(local_stop, remote_stop, held_stop)

    def _ambiguous(self, local_group: int, remote_group: int) -> BlockListError:
        return BlockListError(
            f"group {local_group}: {self.local.lengths[local_group]} local blocks of "
            f"{self.local.tokens_per_block(local_group)} tokens and "
            f"{self.remote.lengths[remote_group]} remote blocks of "
            f"{self.remote.tokens_per_block(remote_group)} do not tell where in the sequence they "
            "stand; pass num_tokens or num_computed_blocks"
        )


def _round_up(tokens: int, block: int) -> int:
    return -(-tokens // block) * block


def _joined(parts: Iterable[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    arrays = list(parts)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _checked_computed(
    num_computed_blocks: Sequence[int] | None, layout: CacheLayout
) -> Sequence[int] | None:
    if num_computed_blocks is None:
        return None
    if len(num_computed_blocks) != len(layout.groups) or min(num_computed_blocks) < 0:
        raise BlockListError(
            f"num_computed_blocks {tuple(num_computed_blocks)} must have one count for each of "
            f"{len(layout.groups)} cache groups, none negative"
        )
    return num_computed_blocks


def _checked_tokens(num_tokens: int | None) -> int | None:
    if num_tokens is not None and num_tokens < 0:
        raise BlockListError(f"num_tokens {num_tokens} must not be negative")
    return num_tokens

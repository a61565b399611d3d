"""Descriptor tables, descriptor ids and runs, against NumPy oracles and against NIXL itself."""

from __future__ import annotations

import array
import contextlib
import ctypes
import itertools
import random
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvnixl._descs import RegionIndex, dense_descs, paired_desc_ids, runs, strided_descs
from tests import descs_oracle as oracle
from tests.descs_oracle import Region

INT32_MAX = 2**31 - 1
UINT64_MAX = 2**64 - 1

property_test = settings(deadline=None, max_examples=150)


def region(
    base: int = 0, block_len: int = 16, stride: int = 16, count: int = 8, device: int = 0
) -> Region:
    return base, block_len, stride, count, device


# --- strategies ---------------------------------------------------------------------------------


@st.composite
def valid_region(draw: st.DrawFn, max_count: int = 40) -> Region:
    """Any region that fits below 2**64; every second one ends close to it."""
    count = draw(st.integers(1, max_count))
    block_len = draw(st.integers(1, 2**20) | st.integers(1, UINT64_MAX // count))
    room = UINT64_MAX - (block_len - 1)  # for base + (count - 1) * stride
    max_stride = room // (count - 1) if count > 1 else UINT64_MAX
    stride = draw(st.just(block_len) | st.integers(block_len, max(block_len, max_stride)))
    if (count - 1) * stride > room:
        stride = block_len
    max_base = room - (count - 1) * stride if count > 1 else room
    base = draw(st.integers(0, max_base) | st.integers(max(0, max_base - 3), max_base))
    return base, block_len, stride, count, draw(st.integers(0, 7) | st.integers(0, UINT64_MAX))


valid_regions = st.lists(valid_region(), min_size=1, max_size=6)


@st.composite
def group_numbers(draw: st.DrawFn, num_regions: int) -> list[int]:
    """One for each region, from 0 on, without gaps."""
    numbers = draw(st.lists(st.integers(0, 3), min_size=num_regions, max_size=num_regions))
    return [sorted(set(numbers)).index(number) for number in numbers]


@st.composite
def grouped_regions(draw: st.DrawFn) -> tuple[list[Region], list[int]]:
    regions = draw(valid_regions)
    return regions, draw(group_numbers(len(regions)))


def blocks_per_group(regions: Sequence[Region], groups: Sequence[int]) -> list[int]:
    """For each group the block count of its smallest region."""
    return [
        min(entry[3] for entry, g in zip(regions, groups, strict=True) if g == group)
        for group in range(max(groups) + 1)
    ]


@st.composite
def index_pairs(draw: st.DrawFn, max_index: int = 30) -> tuple[list[int], list[int]]:
    """Distinct destinations, any sources; often with runs."""
    dst: list[int] = []
    src: list[int] = []
    for start_dst, start_src, length, step in draw(
        st.lists(
            st.tuples(
                st.integers(0, max_index),
                st.integers(0, max_index),
                st.integers(1, 6),
                st.sampled_from((1, -1, 2)),
            ),
            max_size=8,
        )
    ):
        for i in range(length):
            d, s = start_dst + i * step, start_src + i * step
            if d not in dst and 0 <= d <= max_index and 0 <= s <= max_index:
                dst.append(d)
                src.append(s)
    return dst, src


# --- tables -------------------------------------------------------------------------------------


@property_test
@given(valid_regions)
def test_tables_equal_the_oracle_up_to_the_last_address(regions: list[Region]) -> None:
    strided = strided_descs(regions)
    dense = dense_descs(regions)
    for table in (strided, dense):
        assert table.dtype == np.uint64
        assert table.flags.c_contiguous
    np.testing.assert_array_equal(strided, oracle.strided_descs(regions))
    np.testing.assert_array_equal(dense, oracle.dense_descs(regions))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_block_may_end_at_the_end_of_the_address_space(count: int) -> None:
    last = dense_descs([(2**64 - 16 * count, 16, 16, count, 2**64 - 1)])[-1]
    assert last.tolist() == [2**64 - 16, 16, 2**64 - 1]
    with pytest.raises(ValueError, match="ends beyond"):
        dense_descs([(2**64 - 16 * count + 1, 16, 16, count, 0)])


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.int32, ">u8", "<i4", np.uint8])
def test_regions_may_be_an_array(dtype: Any) -> None:
    rows = [(64, 16, 32, 3, 1), (128, 8, 8, 5, 2)]
    kinds: list[Any] = [
        np.array(rows, dtype=dtype),
        np.asfortranarray(np.array(rows, dtype=dtype)),
        memoryview(np.array(rows, dtype=np.int64)),  # type: ignore[arg-type]
        [np.array(row, dtype=dtype) for row in rows],
        [list(row) for row in rows],
    ]
    for regions in kinds:
        np.testing.assert_array_equal(strided_descs(regions), oracle.strided_descs(rows))
        np.testing.assert_array_equal(dense_descs(regions), oracle.dense_descs(rows))


def test_a_single_block_gets_a_stride_that_nixl_accepts() -> None:
    assert strided_descs([(64, 16, 0, 1, 0)]).tolist() == [[64, 16, 0, 16, 1]]


@property_test
@given(
    base=st.integers(0, UINT64_MAX),
    block_len=st.integers(1, UINT64_MAX),
    extra=st.integers(0, UINT64_MAX),
    count=st.integers(2, INT32_MAX),
)
def test_addresses_never_wrap(base: int, block_len: int, extra: int, count: int) -> None:
    stride = block_len + extra
    if base + (count - 1) * stride + block_len <= 2**64:
        assert strided_descs([(base, block_len, stride, count, 0)])[0, 0] == base
    else:
        with pytest.raises(ValueError, match=r"region 0: (base .* ends beyond 2\*\*64|stride .*)"):
            strided_descs([(base, block_len, stride, count, 0)])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (region(block_len=0, stride=0), "region 1: block_len is 0"),
        (region(count=0), "region 1: count is 0"),
        (region(stride=15), "region 1: stride 15 is smaller than block_len 16"),
        (region(base=-1), r"region 1: base -1 is outside 0 .. 2\*\*64 - 1"),
        (region(device=2**64), rf"region 1: device {2**64} is outside"),
        (region(base=2**64 - 8 * 16 + 1), r"region 1: base \d+ with 8 blocks .* beyond 2\*\*64"),
        (region(block_len=2**64 - 1, stride=2**64 - 1), r"region 1: base 0 with 8 blocks"),
        (region(base=2**63, stride=2**63, count=2), "region 1: base"),
        (region(count=2**62, stride=16), r"region 1: base 0 with \d+ blocks"),
        (
            region(base=0, block_len=1, stride=1, count=2**31 - 8),
            r"region 1: count 2147483640 after 8",
        ),
        ((0, 16, 16, 8), "region 1 has 4 fields, not 5"),
        ((0, 16, 16, 8, 0, 0), "region 1 has 6 fields, not 5"),
        (7, "region 1 is 7, not"),
        ((0, 16, 16, 8.0, 0), r"region 1: count 8\.0 is not an integer"),
        ((0, 16, 16, True, 0), "region 1: count True is not an integer"),
        ((0, 16, 16, None, 0), "region 1: count None is not an integer"),
    ],
)
def test_an_invalid_region_is_named(bad: Any, message: str) -> None:
    for build in (strided_descs, dense_descs, RegionIndex):
        with pytest.raises(ValueError, match=message):
            build([region(), bad])


def test_as_many_blocks_as_int32_can_number() -> None:
    counts = (2**30, 2**30 - 1)
    index = RegionIndex([region(block_len=1, stride=1, count=count) for count in counts])
    assert index.num_descs == INT32_MAX
    assert index.desc_ids([[2**30 - 2]]).tolist() == [2**30 - 2, 2**31 - 2]


@pytest.mark.parametrize(
    ("regions", "message"),
    [
        (np.zeros((2, 4), np.uint64), r"shape \(R, 5\), not \(2, 4\)"),
        (np.zeros(5, np.uint64), r"shape \(R, 5\), not \(5,\)"),
        (np.ones((2, 5)), "integers, not float64"),
        (np.ones((2, 5), bool), "integers, not bool"),
        (np.ones((2, 5), object), "integers, not object"),
        (np.array([region(), (0, 16, -16, 8, 0)]), "region 1: stride -16 is negative"),
        (b"abcde", "shape"),
        ([], "regions is empty"),
        (np.zeros((0, 5), np.int64), "regions is empty"),
    ],
)
def test_invalid_region_tables_are_refused(regions: Any, message: str) -> None:
    for build in (strided_descs, dense_descs, RegionIndex):
        with pytest.raises(ValueError, match=message):
            build(regions)


@pytest.mark.parametrize("regions", [None, 5, "abcde", {1, 2}])
def test_regions_that_are_no_sequence(regions: Any) -> None:
    with pytest.raises(TypeError, match="regions must be a sequence of regions, not"):
        strided_descs(regions)


# --- RegionIndex --------------------------------------------------------------------------------


@property_test
@given(grouped_regions())
def test_region_index_properties(grouped: tuple[list[Region], list[int]]) -> None:
    regions, groups = grouped
    index = RegionIndex(regions, groups)
    assert index.num_regions == len(regions)
    assert index.num_groups == max(groups) + 1
    assert index.num_descs == sum(entry[3] for entry in regions)
    assert index.groups == tuple(groups)
    assert strided_descs(index.regions).tolist() == strided_descs(regions).tolist()


def test_region_index_keeps_its_own_copy() -> None:
    table = np.array([region()], np.uint64)
    index = RegionIndex(table)
    table[:] = 0
    index.regions[:] = 0
    assert index.regions.tolist() == [list(region())]
    with pytest.raises(AttributeError):
        index.num_descs = 99  # type: ignore[misc]


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ([0], ValueError, "1 cache groups for 2 regions"),
        ([0, 0, 0], ValueError, "3 cache groups for 2 regions"),
        ([1, 1], ValueError, "cache group 0 has no region"),
        ([0, 2], ValueError, "region 1: cache group 2 is impossible with 2 regions"),
        ([0, INT32_MAX], ValueError, "region 1: cache group 2147483647"),
        ([0, -1], IndexError, "cache groups: -1 at position 1"),
        ([0, 1.0], ValueError, "cache groups: 1.0 at position 1 is not an integer"),
        (0, TypeError, "cache groups must be a sequence of integers, not int"),
    ],
)
def test_groups_must_fit_the_regions(groups: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RegionIndex([region(), region()], groups)


@property_test
@given(grouped_regions(), st.data())
def test_desc_ids_equal_the_oracle(
    grouped: tuple[list[Region], list[int]], data: st.DataObject
) -> None:
    regions, groups = grouped
    block_ids = [
        data.draw(st.lists(st.integers(0, blocks - 1), max_size=20))
        for blocks in blocks_per_group(regions, groups)
    ]
    index = RegionIndex(regions, groups)
    ids = index.desc_ids(block_ids)
    assert ids.dtype == np.int32
    assert ids.flags.c_contiguous
    np.testing.assert_array_equal(ids, oracle.desc_ids(regions, groups, block_ids))


@pytest.mark.parametrize("counts", [(9, 4, 6), (6, 4, 9)])
def test_each_group_is_checked_against_its_smallest_region(counts: tuple[int, int, int]) -> None:
    index = RegionIndex([region(count=count) for count in counts], [0, 1, 0])
    assert index.desc_ids([[5], [3]]).tolist() == [5, counts[0] + 3, counts[0] + 4 + 5]
    with pytest.raises(
        IndexError, match=r"group 0: 6 at position 1 is outside 0 .. 5; .* has 6 blocks"
    ):
        index.desc_ids([[5, 6], [0]])
    with pytest.raises(IndexError, match=r"group 1: 4 at position 0 is outside 0 .. 3"):
        index.desc_ids([[0], [4]])


def test_desc_ids_into_a_given_array() -> None:
    index = RegionIndex([region(), region()])
    out = np.full(6, -1, np.int32)
    ids = index.desc_ids([[1, 3]], out=out)
    assert ids.tolist() == [1, 3, 9, 11]
    assert out.tolist() == [1, 3, 9, 11, -1, -1]
    assert np.shares_memory(ids, out)
    with pytest.raises(IndexError):
        index.desc_ids([[1, 8]], out=out)
    assert out.tolist() == [1, 3, 9, 11, -1, -1]
    assert index.desc_ids([[]], out=out).tolist() == []


def read_only(values: Any) -> Any:
    values.flags.writeable = False
    return values


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(3, np.int32),
        np.zeros(4, np.int64),
        np.zeros(4, np.uint32),
        np.zeros(4, ">i4"),
        np.zeros((4, 1), np.int32),
        np.zeros(8, np.int32)[::2],
        np.frombuffer(bytearray(17), np.int32, 4, 1),
        read_only(np.zeros(4, np.int32)),
        np.ma.zeros(4, np.int32),
        [0, 0, 0, 0],
        array.array("i", [0] * 4),
    ],
)
def test_an_unfit_out_is_refused(out: Any) -> None:
    with pytest.raises(ValueError, match=r"^out "):
        RegionIndex([region(), region()]).desc_ids([[1, 3]], out=out)


@pytest.mark.parametrize(
    ("block_ids", "error", "message"),
    [
        ([], ValueError, "block ids: 0 sequences for 2 cache groups"),
        ([[1], [2], [3]], ValueError, "block ids: 3 sequences for 2 cache groups"),
        ([1, 2], TypeError, "block ids of group 0 must be a sequence of integers, not int"),
        (7, TypeError, "block ids must be one sequence per cache group, not int"),
        (np.array([1, 2]), ValueError, "block ids of group 0 must have one dimension, not 0"),
    ],
)
def test_block_ids_come_as_one_sequence_per_group(
    block_ids: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RegionIndex([region(), region()], [0, 1]).desc_ids(block_ids)


def test_more_descriptor_ids_than_nixl_takes() -> None:
    """2**16 regions times 2**15 repeated ids, refused before anything is allocated."""
    index = RegionIndex(np.tile(np.array([1, 1, 1, 1, 0]), (2**16, 1)))
    with pytest.raises(ValueError, match="2147483648 descriptor ids are too many"):
        index.desc_ids([np.zeros(2**15, np.int32)])


# --- integer sequences of every kind ------------------------------------------------------------


class ArrayLike:
    """As a tensor is to NumPy."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        if isinstance(self.values, Exception):
            raise self.values
        return np.asarray(self.values)


VALUES = [3, 0, 120, 7]
EVERY_OTHER = [3, -1, 0, -1, 120, -1, 7, -1]

ACCEPTED: list[Any] = [
    VALUES,
    tuple(VALUES),
    deque(VALUES),
    [np.int16(value) for value in VALUES],
    [3, np.uint64(0), np.int8(120), 7],
    ArrayLike(VALUES),
    *(np.array(VALUES, code) for code in "bBhHiIlLqQnN"),
    *(np.array(VALUES, code) for code in (">i2", ">u8", "<i4", ">i8")),
    *(np.array(EVERY_OTHER, code)[::2] for code in "bhil"),
    np.array(VALUES[::-1])[::-1],
    np.frombuffer(b"\0" + np.array(VALUES, np.int64).tobytes(), np.int64, 4, 1),
    read_only(np.array(VALUES)),
    np.array([(v, v) for v in VALUES], [("a", "i1"), ("b", "i8")])["b"],
    *(array.array(code, VALUES) for code in "bBhHiIlLqQ"),
    (ctypes.c_int32 * 4)(*VALUES),
    memoryview(array.array("i", VALUES)),
    memoryview(bytes(VALUES)),
]


@pytest.mark.parametrize("values", ACCEPTED, ids=lambda v: f"{type(v).__name__}")
def test_every_kind_of_integers_is_read_alike(values: Any) -> None:
    index = RegionIndex([region(count=121)])
    assert index.desc_ids([values]).tolist() == VALUES
    dst, src, _ = runs(values, VALUES)
    assert sorted(zip(dst.tolist(), src.tolist(), strict=True)) == [(v, v) for v in sorted(VALUES)]


def test_ranges() -> None:
    index = RegionIndex([region(count=10)])
    assert index.desc_ids([range(10)]).tolist() == list(range(10))
    assert index.desc_ids([range(9, -1, -3)]).tolist() == [9, 6, 3, 0]
    assert index.desc_ids([range(0)]).tolist() == []
    with pytest.raises(IndexError, match=r"10 at position 10 is outside 0 .. 9"):
        index.desc_ids([range(11)])
    with pytest.raises(IndexError, match="-1 at position 3"):
        index.desc_ids([range(2, -2, -1)])
    with pytest.raises(IndexError, match=f"{2**100 - 1} at position"):
        runs(range(2**100), [])


def test_subclasses_of_int_count_and_bool_does_not() -> None:
    class BlockId(int):
        pass

    index = RegionIndex([region()])
    assert index.desc_ids([[BlockId(3), 1]]).tolist() == [3, 1]
    falses: list[Any] = [False, np.False_]
    for false in falses:
        with pytest.raises(ValueError, match="at position 1 is not an integer"):
            index.desc_ids([[3, false]])


def test_a_list_that_shrinks_while_it_is_read() -> None:
    values: list[Any] = []

    class Shrinks:
        def __index__(self) -> int:
            values.clear()
            return 1

    values += [0, Shrinks(), *range(2, 1000)]
    index = RegionIndex([region(count=1000)])
    assert index.desc_ids([values]).tolist() == list(range(1000))
    assert values == []


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ([3, 2.0], ValueError, r"2\.0 at position 1 is not an integer"),
    ([3, "2"], ValueError, "'2' at position 1 is not an integer"),
    ([3, None], ValueError, "None at position 1 is not an integer"),
    ([3, [2]], ValueError, r"\[2\] at position 1 is not an integer"),
    (np.array([3.0, 2.0]), ValueError, "must be integers, not float64"),
    (np.array([3, 2], np.float16), ValueError, "must be integers, not float16"),
    (np.array([3, 2], complex), ValueError, "must be integers, not complex128"),
    (np.array([True, False]), ValueError, "must be integers, not bool"),
    (np.array([3, 2], object), ValueError, "must be integers, not object"),
    (np.array([3, 2], "M8[s]"), ValueError, "cannot be read as integers"),
    (np.array([(3, 2)], [("a", "i4"), ("b", "i4")]), ValueError, "must be integers, not"),
    (np.array(["3", "2"]), ValueError, "must be integers, not <U1"),
    (np.array([3.0], ">f8"), ValueError, "must be integers, not float64"),
    (np.array([[3, 2]]), ValueError, "must have one dimension, not 2"),
    (np.array(3), ValueError, "must have one dimension, not 0"),
    (np.int64(3), ValueError, "must have one dimension, not 0"),
    (array.array("d", [3]), ValueError, "must be integers, not buffer format b'd'"),
    (memoryview(b"32").cast("c"), ValueError, "must be integers, not buffer format b'c'"),
    (b"32", ValueError, "bytes have no integer type"),
    (bytearray(b"32"), ValueError, "bytes have no integer type"),
    (ArrayLike([3.0]), ValueError, "must be integers, not float64"),
    (ArrayLike(RuntimeError("on a GPU")), ValueError, "cannot be read as integers: on a GPU"),
    ("32", TypeError, "must be a sequence of integers, not str"),
    (3, TypeError, "must be a sequence of integers, not int"),
    (None, TypeError, "must be a sequence of integers, not NoneType"),
    ({3, 2}, TypeError, "must be a sequence of integers, not set"),
    (iter([3, 2]), TypeError, "must be a sequence of integers, not list_iterator"),
]


@pytest.mark.parametrize(("values", "error", "message"), REFUSED)
def test_what_is_no_sequence_of_integers_is_refused(
    values: Any, error: type[Exception], message: str
) -> None:
    index = RegionIndex([region()])
    with pytest.raises(error, match="^block ids of group 0.*" + message):
        index.desc_ids([values])
    with pytest.raises(error, match="^destination block ids of group 0.*" + message):
        paired_desc_ids(index, [values], index, [[0, 1]])
    with pytest.raises(error, match="^source block ids of group 0.*" + message):
        paired_desc_ids(index, [[0, 1]], index, [values])
    with pytest.raises(error, match="^destination indices.*" + message):
        runs(values, [0, 1])
    with pytest.raises(error, match="^source indices.*" + message):
        runs([0, 1], values)


@pytest.mark.parametrize("value", [-1, 8, 255, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1, 2**200])
def test_an_id_out_of_range_is_named_whatever_carries_it(value: int) -> None:
    """NIXL would narrow 2**32 to 0 and read another block."""
    index = RegionIndex([region(count=8)])
    carriers: list[Any] = [[7, value], (7, value)]
    for code in "bBhHiIqQ":
        with contextlib.suppress(OverflowError):
            carriers.append(array.array(code, [7, value]))
            carriers.append(np.array([7, value], code))
            carriers.append(np.array([7, value], code).astype(f">{np.dtype(code).str[1:]}"))
    assert len(carriers) >= (2 if value == 2**200 else 4)
    for carrier in carriers:
        with pytest.raises(IndexError, match=rf"^block ids .*: {value} at position 1 is outside"):
            index.desc_ids([carrier])
        if not 0 <= value <= INT32_MAX:
            with pytest.raises(IndexError, match=rf"^source indices: {value} at position 1"):
                runs([0, 1], carrier)


# --- runs ---------------------------------------------------------------------------------------


@property_test
@given(index_pairs())
def test_runs_equal_the_oracle(pairs: tuple[list[int], list[int]]) -> None:
    dst, src, num_runs = runs(*pairs)
    for ids in (dst, src):
        assert ids.dtype == np.int32
        assert ids.flags.c_contiguous
    expected_dst, expected_src, expected_runs = oracle.runs(*pairs)
    np.testing.assert_array_equal(dst, expected_dst)
    np.testing.assert_array_equal(src, expected_src)
    assert num_runs == expected_runs == oracle.num_runs(dst.tolist(), src.tolist())
    assert sorted(zip(dst.tolist(), src.tolist(), strict=True)) == sorted(zip(*pairs, strict=True))


@property_test
@given(
    st.lists(
        st.integers(0, 300) | st.integers(INT32_MAX - 300, INT32_MAX) | st.integers(0, INT32_MAX),
        unique=True,
        max_size=60,
    ),
    st.randoms(use_true_random=False),
)
def test_runs_over_the_whole_index_range(dst: list[int], rng: random.Random) -> None:
    src = [d if rng.random() < 0.8 else rng.randrange(2**31) for d in dst]
    ordered = runs(dst, src)
    expected = oracle.runs(dst, src)
    np.testing.assert_array_equal(ordered[0], expected[0])
    np.testing.assert_array_equal(ordered[1], expected[1])
    assert ordered[2] == expected[2]


@pytest.mark.parametrize("high", [2**8, 2**16, 2**24, 2**30])
def test_every_byte_of_an_index_counts_in_the_order(high: int) -> None:
    pairs = [high + 1, 1, high, 0]
    assert runs(pairs, pairs)[0].tolist() == [0, 1, high, high + 1]


@settings(property_test, max_examples=60)
@given(index_pairs(max_index=5))
def test_no_order_has_fewer_runs(pairs: tuple[list[int], list[int]]) -> None:
    dst, src = pairs[0][:6], pairs[1][:6]
    best = min(
        oracle.num_runs([dst[i] for i in order], [src[i] for i in order])
        for order in itertools.permutations(range(len(dst)))
    )
    assert runs(dst, src)[2] == best


@pytest.mark.parametrize(
    ("dst", "src", "num_runs"),
    [
        ([], [], 0),
        ([7], [9], 1),
        ([0], [INT32_MAX], 1),
        ([INT32_MAX - 1, INT32_MAX], [0, 1], 1),
        ([INT32_MAX, INT32_MAX - 1], [1, 0], 1),
        (range(99, -1, -1), range(199, 99, -1), 1),
        ([*range(0, 100, 2), *range(1, 100, 2)], [*range(0, 100, 2), *range(1, 100, 2)], 1),
        (range(100), range(99, -1, -1), 100),
        ([0, 1, 2], [5, 5, 5], 3),
        ([4, 5, 0, 1], [8, 9, 4, 5], 2),
        ([2, 3, 0, 1], [12, 13, 10, 11], 1),
    ],
)
def test_number_of_runs(dst: Sequence[int], src: Sequence[int], num_runs: int) -> None:
    assert runs(dst, src)[2] == num_runs


def test_an_order_that_cannot_be_improved_is_kept() -> None:
    dst, src, num_runs = runs([70, 71, 3, 4, 5, 50], [0, 1, 2, 3, 4, 5])
    assert dst.tolist() == [70, 71, 3, 4, 5, 50]
    assert src.tolist() == [0, 1, 2, 3, 4, 5]
    assert num_runs == 3


def test_runs_never_alias_their_input() -> None:
    dst, src = np.array([1, 2], np.int32), np.array([5, 6], np.int32)
    ordered = runs(dst, src)
    assert not np.shares_memory(ordered[0], dst)
    assert not np.shares_memory(ordered[1], src)
    runs(np.array([2, 1], np.int32), src)
    assert src.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("dst", "message"),
    [
        ([3, 3], "destination indices: 3 occurs twice, at positions 0 and 1"),
        ([4, 5, 6, 0, 5], "5 occurs twice, at positions 1 and 4"),
        ([0, 1, 2, 3, 2], "2 occurs twice, at positions 2 and 4"),
        ([9, INT32_MAX, 0, INT32_MAX], f"{INT32_MAX} occurs twice, at positions 1 and 3"),
        ([0, 9, 0], "0 occurs twice, at positions 0 and 2"),
        ([2, 3, 4, 0, 1, 2, 3], "2 occurs twice, at positions 0 and 5"),
    ],
)
def test_a_destination_that_is_written_twice_is_named(dst: list[int], message: str) -> None:
    src = list(range(len(dst)))
    with pytest.raises(ValueError, match=message):
        runs(dst, src)
    if max(dst) < 16:
        index = RegionIndex([region(count=16)])
        with pytest.raises(ValueError, match=message.removeprefix("destination indices")):
            paired_desc_ids(index, [dst], index, [src])
    ordered = runs(src, dst)  # to read a source twice is fine
    assert ordered[1].tolist() == dst


@property_test
@given(st.lists(st.integers(0, 12), max_size=12))
def test_a_duplicate_destination_is_never_missed(dst: list[int]) -> None:
    src = list(range(len(dst)))
    if len(set(dst)) == len(dst):
        assert sorted(runs(dst, src)[0].tolist()) == sorted(dst)
    else:
        with pytest.raises(ValueError, match="occurs twice"):
            runs(dst, src)


def test_lists_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="3 destination and 2 source indices"):
        runs([1, 2, 3], [1, 2])
    index = RegionIndex([region(), region()], [0, 1])
    with pytest.raises(ValueError, match="group 1: 1 destination and 2 source block ids"):
        paired_desc_ids(index, [[1], [1]], index, [[1], [1, 2]])


# --- both sides at once -------------------------------------------------------------------------


@st.composite
def paired_sides(
    draw: st.DrawFn,
) -> tuple[list[Region], list[Region], list[int], list[list[int]], list[list[int]]]:
    """Two sides with the same groups and block lengths; strides, counts and addresses differ."""
    num_regions = draw(st.integers(1, 4))
    groups = draw(group_numbers(num_regions))
    sides: list[list[Region]] = [[], []]
    for r in range(num_regions):
        block_len = draw(st.sampled_from((8, 16)))
        for side in sides:
            stride = draw(st.sampled_from((block_len, block_len, block_len + 8)))
            # Regions of a side touch now and then.
            base = (
                0
                if r == 0
                else side[-1][0] + side[-1][2] * side[-1][3] + draw(st.sampled_from((0, 8)))
            )
            side.append((base, block_len, stride, draw(st.integers(1, 20)), 0))
    pairs = [
        draw(index_pairs(max_index=min(counts) - 1))
        for counts in zip(*(blocks_per_group(side, groups) for side in sides), strict=True)
    ]
    return sides[0], sides[1], groups, [dst for dst, _ in pairs], [src for _, src in pairs]


@property_test
@given(paired_sides())
def test_paired_ids_equal_the_oracle(
    sides: tuple[list[Region], list[Region], list[int], list[list[int]], list[list[int]]],
) -> None:
    dst_regions, src_regions, groups, dst_blocks, src_blocks = sides
    dst_ids, src_ids, num_descs = paired_desc_ids(
        RegionIndex(dst_regions, groups), dst_blocks, RegionIndex(src_regions, groups), src_blocks
    )
    ordered = [oracle.runs(d, s) for d, s in zip(dst_blocks, src_blocks, strict=True)]
    for ids, regions, blocks in (
        (dst_ids, dst_regions, [dst.tolist() for dst, _, _ in ordered]),
        (src_ids, src_regions, [src.tolist() for _, src, _ in ordered]),
    ):
        assert ids.dtype == np.int32
        assert ids.flags.c_contiguous
        np.testing.assert_array_equal(ids, oracle.desc_ids(regions, groups, blocks))
    assert num_descs == oracle.num_descs(
        dst_regions, dst_ids.tolist(), src_regions, src_ids.tolist()
    )


@pytest.mark.parametrize(
    ("src_regions", "src_groups", "message"),
    [
        ([region()], [0], "the destination has 2 regions, the source 1"),
        ([region(), region()], [0, 0], "region 1 is in cache group 1 at the destination, in 0"),
        (
            [region(), region(block_len=8)],
            [0, 1],
            "region 1 has block_len 16 at the destination, 8 at the source",
        ),
    ],
)
def test_sides_that_do_not_match_are_refused(
    src_regions: list[Region], src_groups: list[int], message: str
) -> None:
    dst = RegionIndex([region(), region()], [0, 1])
    src = RegionIndex(src_regions, src_groups)
    with pytest.raises(ValueError, match=message):
        paired_desc_ids(dst, [[0], [0]], src, [[0]] * src.num_groups)


def test_each_side_is_checked_against_its_own_regions() -> None:
    small, large = RegionIndex([region(count=4)]), RegionIndex([region(count=9)])
    assert paired_desc_ids(small, [[3]], large, [[8]])[2] == 1
    with pytest.raises(IndexError, match=r"^source block ids of group 0: 4 at position 0"):
        paired_desc_ids(large, [[8]], small, [[4]])
    with pytest.raises(IndexError, match=r"^destination block ids of group 0: 4 at position 0"):
        paired_desc_ids(small, [[4]], large, [[8]])


def test_neither_side_may_be_missing() -> None:
    index = RegionIndex([region()])
    with pytest.raises(TypeError, match="dst"):
        paired_desc_ids(None, [[0]], index, [[0]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="src"):
        paired_desc_ids(index, [[0]], None, [[0]])  # type: ignore[arg-type]


# --- NIXL's own count ---------------------------------------------------------------------------

BUFFER_BYTES = 1 << 16


class Loopback:
    """Two NIXL agents of this process, one buffer each."""

    def __init__(self) -> None:
        from nixl._api import nixl_agent, nixl_agent_config

        self.agents = [
            nixl_agent(name, nixl_agent_config(capture_telemetry=True, num_threads=1))
            for name in ("descs-reader", "descs-owner")
        ]
        self.buffers = [np.zeros(BUFFER_BYTES, np.uint8) for _ in self.agents]
        self.registrations = [
            agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")
            for agent, buffer in zip(self.agents, self.buffers, strict=True)
        ]
        reader, owner = self.agents
        self.owner_name = reader.add_remote_agent(owner.get_agent_metadata())

    def read(self, dst_descs: Any, dst_ids: Any, src_descs: Any, src_ids: Any) -> int:
        """READs and returns how many descriptors NIXL was left with."""
        agent = self.agents[0]
        with contextlib.ExitStack() as stack:
            dst = agent.prep_xfer_dlist("NIXL_INIT_AGENT", dst_descs, "DRAM")
            stack.callback(agent.release_dlist_handle, dst)
            src = agent.prep_xfer_dlist(self.owner_name, src_descs, "DRAM")
            stack.callback(agent.release_dlist_handle, src)
            handle = agent.make_prepped_xfer("READ", dst, dst_ids, src, src_ids)
            stack.callback(agent.release_xfer_handle, handle)
            state = agent.transfer(handle)
            deadline = time.monotonic() + 30
            while state == "PROC" and time.monotonic() < deadline:
                state = agent.check_xfer_state(handle)
            assert state == "DONE"
            return int(agent.get_xfer_telemetry(handle).descCount)

    def close(self) -> None:
        self.agents[0].remove_remote_agent(self.owner_name)
        for agent, registration in zip(self.agents, self.registrations, strict=True):
            agent.deregister_memory(registration)
        self.agents.clear()


@pytest.fixture(scope="module")
def loopback() -> Iterator[Loopback]:
    pair = Loopback()
    yield pair
    pair.close()


def place(regions: Sequence[Region], buffer: Any) -> list[Region]:
    """The same regions, moved into ``buffer``."""
    return [(buffer.ctypes.data + entry[0], *entry[1:]) for entry in regions]


@pytest.mark.nixl
@settings(property_test, max_examples=40)
@given(paired_sides())
def test_nixl_is_left_with_as_many_descriptors_and_moves_the_right_bytes(
    loopback: Loopback,
    sides: tuple[list[Region], list[Region], list[int], list[list[int]], list[list[int]]],
) -> None:
    dst_regions, src_regions, groups, dst_blocks, src_blocks = sides
    dst_buffer, src_buffer = loopback.buffers
    src_buffer[:] = np.random.default_rng(0).integers(1, 256, BUFFER_BYTES, np.uint8)
    dst_buffer[:] = 0
    expected = np.zeros_like(dst_buffer)
    for dst_region, src_region, group in zip(dst_regions, src_regions, groups, strict=True):
        for d, s in zip(dst_blocks[group], src_blocks[group], strict=True):
            to, start, length = dst_region[0] + d * dst_region[2], src_region[0], dst_region[1]
            start += s * src_region[2]
            expected[to : to + length] = src_buffer[start : start + length]
    dst_placed, src_placed = place(dst_regions, dst_buffer), place(src_regions, src_buffer)
    dst_ids, src_ids, num_descs = paired_desc_ids(
        RegionIndex(dst_placed, groups), dst_blocks, RegionIndex(src_placed, groups), src_blocks
    )
    if len(dst_ids) == 0:
        return  # NIXL refuses an empty transfer
    count = loopback.read(strided_descs(dst_placed), dst_ids, strided_descs(src_placed), src_ids)
    assert count == num_descs
    np.testing.assert_array_equal(dst_buffer, expected)


@pytest.mark.nixl
@pytest.mark.parametrize(
    "order", [range(99, -1, -1), [*range(0, 100, 2), *range(1, 100, 2)]], ids=["reversed", "halves"]
)
def test_a_fragmented_list_becomes_one_descriptor_per_region(
    loopback: Loopback, order: Sequence[int]
) -> None:
    regions = [region(base=r * 4096, count=100) for r in range(3)]
    sides = [place(regions, buffer) for buffer in loopback.buffers]
    indexes = [RegionIndex(side) for side in sides]
    tables = [strided_descs(side) for side in sides]
    given_ids = [index.desc_ids([order]) for index in indexes]
    assert loopback.read(tables[0], given_ids[0], tables[1], given_ids[1]) == 300
    dst_ids, src_ids, num_descs = paired_desc_ids(indexes[0], [order], indexes[1], [order])
    assert loopback.read(tables[0], dst_ids, tables[1], src_ids) == num_descs == 3


@pytest.mark.nixl
def test_nixl_merges_from_one_region_into_the_next_only_in_dense_lists(loopback: Loopback) -> None:
    regions = [region(), region(base=8 * 16)]
    sides = [place(regions, buffer) for buffer in loopback.buffers]
    indexes = [RegionIndex(side) for side in sides]
    dst_ids, src_ids, num_descs = paired_desc_ids(indexes[0], [range(8)], indexes[1], [range(8)])
    strided = [strided_descs(side) for side in sides]
    assert loopback.read(strided[0], dst_ids, strided[1], src_ids) == num_descs == 2
    dense = [dense_descs(side) for side in sides]
    assert loopback.read(dense[0], dst_ids, dense[1], src_ids) == 1


@pytest.mark.nixl
def test_nixl_takes_the_dense_table_too(loopback: Loopback) -> None:
    sides = [place([region(stride=32), region(base=4096)], buffer) for buffer in loopback.buffers]
    ids = RegionIndex(sides[0]).desc_ids([range(8)])
    tables = [dense_descs(side) for side in sides]
    assert loopback.read(tables[0], ids, tables[1], ids) == 8 + 1

"""Tables against a dict: folds, merges, look-ups, scans and compaction, for all types."""

from __future__ import annotations

import decimal
import itertools
import math
from collections import defaultdict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import table_model as model
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ackcore._arrow.hashing import hash_columns
from ackcore.tables import (
    BatchFold,
    collect,
    count,
    first,
    folding,
    key_groups,
    min_of,
    sliding,
    sum_of,
    table_compaction,
)
from ackcore.tables.folding import finished, fold_rows, merge_states
from ackcore.tables.table_compaction import SegmentInfo, after_merge, merge_due, weight_of
from ackcore.tables.table_segments import TableReader, TableSegment, merged_parts, write_segment
from ackcore.tables.table_shape import HASH, HASH_END, TableShape

#: The bits of the hash that are kept: all, two, or none, where all keys collide.
MASKS = [2**64 - 1, 2**62 | 2**63, 1, 0]


class StoredTable:
    """A table as the driver keeps it: segments by name, newest first."""

    def __init__(self, shape):
        self.shape = shape
        self.infos = []
        self.files = {}
        self.number = 0
        self.horizon = 0

    def put(self, rows, lo=0, hi=HASH_END):
        self.number += 1
        data = write_segment(self.shape, rows, lo, hi)
        self.files[str(self.number)] = data
        return SegmentInfo(str(self.number), rows.num_rows, len(data), lo, hi)

    def opened(self, infos):
        return [
            TableSegment.open(self.files[info.file], self.shape, info.lo, info.hi) for info in infos
        ]

    def reader(self):
        return TableReader(self.shape, self.opened(self.infos), self.horizon)

    def apply(self, batches, now_ms):
        partial = fold_rows(self.shape, batches, now_ms)
        self.horizon = now_ms
        older = self.reader().lookup(partial)
        older = older.filter(pc.is_valid(older.column(HASH)))
        self.infos.insert(0, self.put(merge_states(self.shape, older, partial)))

    def compact(self):
        merge = merge_due(self.infos)
        if merge is not None:
            opened = self.opened(merge.segments)
            horizon = self.horizon if merge.into_base else None
            parts = merged_parts(self.shape, opened, merge.lo, merge.hi, horizon)
            made = [self.put(rows, lo, hi) for lo, hi, rows in parts]
            of = dict(zip(merge.segments, opened, strict=True))

            def rows_between(info, lo, hi):
                return of[info].between(lo, hi).rows

            self.infos = list(after_merge(self.infos, merge, made, rows_between))
            for info, segment in zip(self.infos, self.opened(self.infos), strict=True):
                assert info.rows == segment.rows


def as_dict(shape, stored):
    """Return stored rows as finished values by key."""
    names = shape.key_names
    rows = finished(shape, stored).to_pylist()
    found = {
        tuple(model.canonical(row[name]) for name in names): {
            name: model.canonical(row[name]) for name in shape.aggregates
        }
        for row in rows
    }
    assert len(found) == len(rows), "a key has two rows"
    return found


@pytest.fixture
def small(monkeypatch):
    """Make segments and merges so small that few rows need many of them."""
    monkeypatch.setattr(folding, "RANGE_ROWS", 3)
    monkeypatch.setattr(table_compaction, "DELTA_ROWS", 6)
    monkeypatch.setattr(table_compaction, "MAX_DELTAS", 2)
    mask = {"bits": MASKS[0]}

    def masked(columns, n):
        hashes = hash_columns(columns, n).view(np.uint64)
        return (hashes & np.uint64(mask["bits"])).view(np.int64)

    monkeypatch.setattr(key_groups, "hash_columns", masked)
    return mask


@settings(
    max_examples=settings.default.max_examples // 2,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_table_equals_a_dict(small, data):
    small["bits"] = data.draw(st.sampled_from(MASKS))
    keys = model.key_columns(data)
    columns = {**keys, **model.VALUES}
    schema = model.batch_of([], columns).schema
    ttl_s = data.draw(st.sampled_from([None, 5]))
    shape = TableShape.of("t", schema, list(keys), model.AGGREGATES, ttl_s)
    table, oracle, expires = StoredTable(shape), defaultdict(list), {}
    for now in range(1000, 1000 * data.draw(st.integers(1, 6)) + 1, 1000):
        pieces = data.draw(st.lists(st.lists(model.rows_of(columns), max_size=8), max_size=3))
        table.apply([model.batch_of(piece, columns) for piece in pieces], now)
        for key in [key for key, end in expires.items() if end <= now]:
            del oracle[key], expires[key]
        for row in [row for piece in pieces for row in piece]:
            key = tuple(model.canonical(row[name]) for name in keys)
            oracle[key].append(row)
            if ttl_s:
                expires[key] = now + 5000
        table.compact()
        # The time passes without another row.
        table.horizon = now + data.draw(st.sampled_from([0, 0, 3500]))
        want = {
            key: {name: model.canonical(value) for name, value in model.expected(rows).items()}
            for key, rows in oracle.items()
            if expires.get(key, math.inf) > table.horizon
        }
        reader = table.reader()
        cuts = sorted(
            {
                0,
                HASH_END,
                *data.draw(
                    st.lists(
                        st.sampled_from([0, 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]), max_size=2
                    )
                ),
            }
        )
        scanned = [part for lo, hi in itertools.pairwise(cuts) for part in reader.scan(lo, hi)]
        stored = pa.concat_tables([shape.stored_schema.empty_table(), *scanned])
        assert (np.diff(stored.column(HASH).to_numpy().astype(object)) >= 0).all()
        assert as_dict(shape, stored) == want
        sought = data.draw(st.lists(model.rows_of(keys), min_size=1, max_size=9))
        found = reader.lookup(model.batch_of(sought, keys))
        values = finished(shape, found).to_pylist()
        for row, key_hash, got in zip(sought, found.column(HASH).to_pylist(), values, strict=True):
            key = tuple(model.canonical(row[name]) for name in keys)
            assert (key_hash is not None) is (key in want)
            if key in want:
                assert {name: model.canonical(got[name]) for name in want[key]} == want[key]
            else:
                assert set(map(str, got.values())) == {"None"}


@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1)), min_size=1),
    cents=st.integers(0, 10**38 - 1),
)
@example(rows=[(0, -(2**63))], cents=0)
def test_sums_are_exact_or_an_error(rows, cents):
    numbers = pa.table({"k": [k for k, _ in rows], "v": pa.array([v for _, v in rows], pa.int64())})
    shape = TableShape.of("t", numbers.schema, "k", {"v": sum_of("v")})
    sums = defaultdict(int)
    for k, v in rows:
        sums[k] += v
    if not all(-(2**63) <= total < 2**63 for total in sums.values()):
        with pytest.raises(OverflowError, match="the sum of column 'v' must fit int64, got "):
            fold_rows(shape, [numbers], 0)
    else:
        got = finished(shape, fold_rows(shape, [numbers], 0)).to_pylist()
        assert {row["k"]: row["v"] for row in got} == sums
    with decimal.localcontext(prec=50):
        parts = [decimal.Decimal(part) for part in (cents, cents, -cents, cents // 3)]
        total = sum(parts)
        exact = pa.table({"k": [1] * 4, "v": pa.array(parts, pa.decimal128(38, 0))})
        shape = TableShape.of("t", exact.schema, "k", {"v": sum_of("v")})
        if abs(total) >= 10**38:
            with pytest.raises(OverflowError, match="must fit decimal128"):
                fold_rows(shape, [exact], 0)
        else:
            assert finished(shape, fold_rows(shape, [exact], 0)).column("v").to_pylist() == [total]


def test_distinct_values_are_estimated_without_nulls():
    pytest.importorskip("datasketches")
    from ackcore.tables import approx_distinct  # noqa: PLC0415

    rows = pa.table({"k": [1] * 60_000 + [2], "v": [n % 20_000 for n in range(60_000)] + [None]})
    shape = TableShape.of("t", rows.schema, "k", {"v": approx_distinct("v")})
    parts = [fold_rows(shape, [rows.slice(start, 20_001)], 0) for start in (0, 20_001, 40_002)]
    one = finished(shape, merge_states(shape, merge_states(shape, parts[0], parts[1]), parts[2]))
    found = {row["k"]: row["v"] for row in one.to_pylist()}
    assert found[2] == 0
    assert found[1] == pytest.approx(20_000, rel=0.05)


def test_a_column_of_the_type_null_has_no_values():
    rows = pa.table({"k": [1, 1], "v": pa.nulls(2)})
    shape = TableShape.of("t", rows.schema, "k", {"v": collect("v", 3), "w": first("k", "v")})
    once = fold_rows(shape, [rows], 0)
    found = finished(shape, merge_states(shape, once, once))
    assert found.to_pylist() == [{"k": 1, "v": [], "w": None}]


def test_an_expired_row_hides_older_rows_until_a_merge_into_the_base():
    rows = pa.table({"k": [1, 2], "v": [5, 6]})
    shapes = [TableShape.of("t", rows.schema, "k", {"v": sum_of("v")}, ttl) for ttl in (100, 1)]
    older, newer = (fold_rows(shape, [rows], 0) for shape in shapes)
    shape = shapes[0]
    old, new = (TableSegment.open(write_segment(shape, each), shape) for each in (older, newer))
    hidden = pa.concat_tables([rows for *_, rows in merged_parts(shape, [new], 0, HASH_END, None)])
    hidden = TableSegment.open(write_segment(shape, hidden), shape)
    for segments in ([new, old], [hidden, old]):
        reader = TableReader(shape, segments, 5_000)
        assert reader.lookup(rows).column(HASH).null_count == 2
        assert not list(reader.scan())
        assert not any(len(rows) for *_, rows in merged_parts(shape, segments, 0, HASH_END, 5_000))
    assert TableReader(shape, [old], 5_000).lookup(rows).column(HASH).null_count == 0


@pytest.mark.parametrize(
    ("row_bytes", "rows", "batches", "keys", "most", "times"),
    [
        (1, 1_000, 3_000, math.inf, 2, 12),
        (5_000, 1_000, 800, math.inf, 2, 14),
        (1, 20_000, 500, 3_000_000, 2, 14),
        (1, 1_000_000, 30, 6_000_000, 10.5, 8),
    ],
)
def test_a_micro_batch_merges_little_and_each_row_is_rewritten_rarely(
    row_bytes, rows, batches, keys, most, times
):
    """The rows have ``keys`` keys, in random order; infinitely many if each row has a new key."""
    names, infos, written, weights = itertools.count(), [], 0, []

    def put(size, lo, hi):
        return SegmentInfo(str(next(names)), size, size * row_bytes, lo, hi)

    def share(info, lo, hi):
        return round(info.rows * (min(hi, info.hi) - max(lo, info.lo)) / (info.hi - info.lo))

    for _ in range(batches):
        new = put(rows, 0, HASH_END)
        done, pace = 0, max(1, table_compaction.MERGED_PER_ROW * weight_of([new]))
        while (merge := merge_due(infos)) and (not done or done + merge.weight <= pace):
            done += merge.weight
            width = merge.hi - merge.lo
            parts = math.ceil(merge.weight)
            within = keys * width / HASH_END
            size = round(sum(share(one, merge.lo, merge.hi) for one in merge.segments))
            if keys < math.inf:
                unseen = (1 - share(one, merge.lo, merge.hi) / within for one in merge.segments)
                size = round(within * (1 - math.prod(max(0, each) for each in unseen)))
            cuts = [merge.lo + width * part // parts for part in range(parts + 1)]
            made = [put(size // parts, lo, hi) for lo, hi in itertools.pairwise(cuts)]
            written += size
            # Expired rows may be dropped only if nothing older remains.
            older = infos[max(map(infos.index, merge.segments)) + 1 :]
            nothing = not any(one.lo < merge.hi and merge.lo < one.hi for one in older)
            assert merge.into_base <= nothing
            infos = list(after_merge(infos, merge, made, share))
        infos.insert(0, new)
        weights.append(done)
        ends = sorted({end for one in infos for end in (one.lo, one.hi)})
        depths = [sum(one.lo <= place < one.hi for one in infos) for place in ends[:-1]]
        # A merge of large deltas takes several micro-batches.
        large = 2 * table_compaction.DELTA_PART * weight_of(infos)
        assert max(depths) <= table_compaction.MAX_DELTAS + 4 + large
        assert min(depths) >= 1
        assert len(infos) <= sum(weights) + 4 * table_compaction.MAX_DELTAS
    assert max(weights) <= most
    assert written < times * rows * batches
    if keys == math.inf:
        assert sum(one.rows for one in infos) == pytest.approx(rows * batches, rel=0.01)


@pytest.mark.parametrize("texts", [range(100), ["open", "paid"] * 50])
def test_scans_and_merges_hold_a_bounded_number_of_bytes(texts, monkeypatch):
    monkeypatch.setattr(folding, "RANGE_BYTES", 1 << 16)
    rows = pa.table({"k": range(100), "v": [f"{text:4000}" for text in texts]})
    shape = TableShape.of("t", rows.schema, "k", {"v": min_of("v")})
    segment = TableSegment.open(write_segment(shape, fold_rows(shape, [rows], 0)), shape)
    parts = [rows for *_, rows in merged_parts(shape, [segment], 0, HASH_END, None)]
    assert sum(map(len, parts)) == 100
    assert max(part.nbytes for part in parts) < 3 << 16


class Widest(BatchFold):
    """The longest text; notes how many rows each call gets."""

    columns = ("v",)
    state = pa.schema([("v", pa.string())])

    def __init__(self):
        self.folded, self.merged = [], []

    def fold(self, rows, starts):
        self.folded.append(len(rows))
        texts = rows.column("v").to_pylist()
        longest = [max(texts[i:j], key=len) for i, j in itertools.pairwise(starts)]
        return pa.record_batch([pa.array(longest, pa.string())], self.state)

    def merge(self, earlier, later):
        self.merged.append(len(earlier))
        pairs = zip(earlier[0].to_pylist(), later[0].to_pylist(), strict=True)
        return pa.record_batch([[max(pair, key=len) for pair in pairs]], self.state)


@pytest.mark.parametrize("limit", ["rows", "bytes"])
def test_folds_and_merges_take_a_bounded_number_of_rows_at_once(limit, monkeypatch):
    """A row of 20 windows counts 20 times; text of more than 2 GiB does not fit into an array."""
    sizes = {"rows": (200, 30, 1 << 30), "bytes": (10**6, 10**6, 1 << 14)}
    rows, stored, nbytes = sizes[limit]
    for name, size in (("BLOCK", nbytes), ("PARTIAL", nbytes // 4)):
        monkeypatch.setattr(folding, f"_{name}_BYTES", size)
    monkeypatch.setattr(folding, "_BLOCK_ROWS", rows)
    monkeypatch.setattr(folding, "RANGE_ROWS", stored)
    monkeypatch.setattr(folding, "RANGE_BYTES", nbytes // 4)
    number, text = range(300), "text" * 15
    times = pa.array([20 * (n % 2) for n in number], pa.timestamp("s"))
    batch = pa.record_batch([[n % 20 for n in number], times, [text] * 300], names=["k", "at", "v"])
    fold = Widest()
    value = {"v": fold, "n": count()}
    shape = TableShape.of("t", batch.schema, "k", value, window=sliding(20, 1, "at"))
    found = merge_states(shape, *(fold_rows(shape, [batch], -100) for _ in range(2)))
    assert len(found) == 20 * 20
    assert set(finished(shape, found)["v"].to_pylist()) == {text}
    assert finished(shape, found)["n"].to_pylist() == [30] * 400
    assert max(fold.folded) <= 220
    assert max(fold.merged) <= 100


@given(
    hashes=st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 40), max_size=80),
    repeated=st.integers(1, 3),
)
def test_rows_are_in_the_stable_order_of_their_hashes(hashes, repeated):
    column = np.array(hashes * repeated, np.uint64)
    expected = sorted(range(len(column)), key=lambda row: column[row])
    assert key_groups._ascending(column).tolist() == expected

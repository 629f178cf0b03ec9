"""Ids: fixed for ever, the same from both backends, bijective or never 0 as promised."""

import array
import hashlib
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from separately import run_threads

import ackcore.ids
from ackcore._columns import signed
from ackcore._reference.id_hashes import GOLDEN, mix, subkey

WORD = 2**64
#: 64 bits in either sign.
ANY_BITS = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 1]) | st.integers(
    -(2**63), 2**64 - 1
)
PARTITIONS = st.sampled_from([0, 1, 2**16 - 1]) | st.integers(0, 2**16 - 1)
OFFSETS = st.sampled_from([0, 1, 2**42 - 1]) | st.integers(0, 2**42 - 1)
ATTEMPTS = st.integers(0, 2**6 - 1)
ORDINALS = st.sampled_from([0, 1, 2**63 - 1]) | st.integers(0, 2**63 - 1)
COMPONENTS = st.text(max_size=8) | ANY_BITS

# Fixed vectors.  If one of these fails, checkpoints in the field are no longer understood.
ROOT_VECTORS = [
    ((0, 0, 0, 0), 3339242005867958263),
    ((1, 0, 0, 0), 2475540493143794572),
    ((-1, 2**16 - 1, 2**42 - 1, 2**6 - 1), 5641608331452798037),
    ((0x0123456789ABCDEF, 3, 1_000_000, 2), 761613009563519434),
]
EDGE_VECTORS = [
    ((0, 0, 0, 0, 0), -5352367159630340014),
    ((1, -1, "split", 0, 0), 1815058046865456687),
    ((0x0123456789ABCDEF, 42, "count", -(2**63), 2**63 - 1), 4924190488340323832),
    ((-1, 2**64 - 1, "Zähler", 7, 1), 6032634960508033845),
]
SPOUT_VECTORS = [
    ((0, "", "", 0), 324177416134227722),
    ((0x0123456789ABCDEF, "lines", "orders", 1), 5390731602691654580),
    ((-1, "Zeilen-ü", "t", 2**63 - 1), -7103843562871275345),
]
# Storm's own, run there: roots to their task among 4 and among 7.
TASK_VECTORS = [
    (0, 3, 3),
    (1, 0, 4),
    (-1, 3, 3),
    (42, 1, 3),
    (-(2**63), 3, 1),
    (2**63 - 1, 3, 1),
    (0x0123456789ABCDEF, 3, 2),
]


def unmix(x):
    """Undo `mix`."""
    for by, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        mixed = x
        for _ in range(64 // by):
            x = mixed ^ x >> by
        x = x * pow(factor, -1, WORD) % WORD
    return x


def parts_of(key, root):
    """The inverse of root_id: that there is one proves that root_id is a bijection."""
    key %= WORD
    x = unmix((root % WORD) ^ subkey(key, 2))
    x = unmix((x - subkey(key, 1)) % WORD) ^ subkey(key, 0)
    return x // 2**48, x // 2**6 % 2**42, x % 2**6


def test_mixer_is_splitmix64():
    # Published outputs of SplitMix64 started at 1234567.
    assert [subkey(1234567, i) for i in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize(("arguments", "expected"), ROOT_VECTORS)
def test_root_id_vectors(backend, arguments, expected):
    assert backend.root_id(*arguments) == expected


@pytest.mark.parametrize(("arguments", "expected"), EDGE_VECTORS)
def test_edge_id_vectors(backend, arguments, expected):
    assert backend.edge_id(*arguments) == expected


@pytest.mark.parametrize(("arguments", "expected"), SPOUT_VECTORS)
def test_spout_key_vectors(arguments, expected):
    deployment_key, component, topic, generation = arguments
    message = b"".join(
        len(text).to_bytes(8, "little") + text
        for text in (component.encode("utf-8"), topic.encode("utf-8"))
    ) + generation.to_bytes(8, "little")
    secret = (deployment_key % WORD).to_bytes(8, "little")
    digest = hashlib.blake2b(message, digest_size=8, key=secret, person=b"ackcore.spout").digest()
    assert int.from_bytes(digest, "little", signed=True) == expected
    assert ackcore.ids.spout_key(*arguments) == expected


@pytest.mark.parametrize(("root", "of_4", "of_7"), TASK_VECTORS)
def test_acker_task_vectors(backend, root, of_4, of_7):
    assert (backend.acker_task(root, 4), backend.acker_task(root, 7)) == (of_4, of_7)


def test_component_key_stands_for_its_name(backend):
    key = ackcore.ids.component_key("split")
    assert key == 3006679282755052820
    assert ackcore.ids.component_key(key % WORD) == key
    assert backend.edge_id(5, 6, "split", 7, 8) == backend.edge_id(5, 6, key, 7, 8)


@given(ANY_BITS, PARTITIONS, OFFSETS, ATTEMPTS)
def test_root_id_is_a_bijection(backend, key, partition, offset, attempt):
    root = backend.root_id(key, partition, offset, attempt)
    assert parts_of(key, root) == (partition, offset, attempt)


@given(ANY_BITS, ANY_BITS, COMPONENTS, ANY_BITS, ORDINALS)
def test_backends_make_the_same_edge_ids(native, reference, key, root, component, parent, ordinal):
    edge = native.edge_id(key, root, component, parent, ordinal)
    assert edge == reference.edge_id(key, root, component, parent, ordinal)
    assert edge != 0


@given(ANY_BITS, st.integers(1, 2**31 - 1))
def test_backends_choose_the_same_acker(native, reference, root, n):
    assert native.acker_task(root, n) == reference.acker_task(root, n)


@pytest.mark.parametrize("key", [0, -1, 0x0123456789ABCDEF])
def test_near_parts_have_other_root_ids(backend, key):
    """The corners of the ranges, where a part that spilled into the next would show."""
    near = [0, 1, 2]
    partitions = [*near, 2**15, 2**16 - 2, 2**16 - 1]
    offsets = [*near, 2**10, 2**26, 2**41, 2**42 - 2, 2**42 - 1]
    attempts = [*near, 31, 62, 63]
    parts = [(p, o, a) for p in partitions for o in offsets for a in attempts]
    columns = [np.array(column) for column in zip(*parts, strict=True)]
    p, o, a = columns[0].astype(np.int32), columns[1], columns[2].astype(np.int32)
    roots = backend.root_ids(key, p, o, a)
    assert roots.dtype == np.int64
    assert len(set(roots.tolist())) == len(parts)
    assert [parts_of(key, root) for root in roots.tolist()] == parts
    assert roots.tolist() == [backend.root_id(key, *row) for row in parts]


def test_one_integer_stands_for_all_rows(backend):
    offsets = np.arange(9)
    threes, fours = np.full(9, 3, np.int32), np.full(9, 4, np.int32)
    expected = backend.root_ids(7, threes, offsets, fours).tolist()
    assert backend.root_ids(7, 3, offsets, 4).tolist() == expected
    assert backend.root_ids(7, np.int64(3), offsets, fours).tolist() == expected
    roots = np.array(expected)
    parents, ordinals = np.full(9, -6), np.full(9, 2)
    expected = backend.edge_ids(7, roots, "b", parents, ordinals).tolist()
    assert backend.edge_ids(7, roots, "b", -6, 2).tolist() == expected
    assert backend.edge_ids(7, roots, "b", 2**64 - 6, ordinals).tolist() == expected
    assert expected == [backend.edge_id(7, root, "b", -6, 2) for root in roots.tolist()]


def test_edge_id_is_never_zero(backend):
    """The one ordinal that the mixer takes to 0, found by undoing it."""
    key, root, component, parent_edge = 11, 22, 33, 44
    x = mix(mix(root ^ subkey(key, 3)) + parent_edge ^ subkey(component ^ key, 4))
    ordinal = -x * pow(GOLDEN, -1, WORD) % WORD
    # Ordinals have 63 bits: half of the parents have no such ordinal.
    while ordinal >= 2**63:
        parent_edge += 1
        x = mix(mix(root ^ subkey(key, 3)) + parent_edge ^ subkey(component ^ key, 4))
        ordinal = -x * pow(GOLDEN, -1, WORD) % WORD
    instead = signed(subkey(key, 5) | 1)
    assert backend.edge_id(key, root, component, parent_edge, ordinal) == instead
    ordinals = np.array([ordinal - 1, ordinal])
    assert (
        backend.edge_ids(key, np.array([root] * 2), component, parent_edge, ordinals)[1] == instead
    )


@given(st.lists(st.tuples(ANY_BITS, st.integers(0, 6), ANY_BITS), max_size=40))
def test_xor_by_parent_is_the_naive_loop(backend, rows):
    expected = [0] * 7
    for edge, parent, _ in rows:
        expected[parent] ^= edge % WORD
    parents = np.array([parent for _, parent, _ in rows], np.int64)
    edges = np.array([edge % WORD for edge, _, _ in rows], np.uint64)
    xors = backend.xor_by_parent(parents, edges, 7)
    assert xors.dtype == np.int64
    assert xors.tolist() == [signed(xor) for xor in expected]


def test_empty_columns_give_empty_columns(backend):
    none, no_tasks = np.empty(0, np.int64), np.empty(0, np.int32)
    for column, dtype in [
        (backend.root_ids(1, no_tasks, none, 0), np.int64),
        (backend.edge_ids(1, none, "b", none, none), np.int64),
        (backend.xor_by_parent(none, none, 0), np.int64),
        (backend.acker_task(none, 3), np.int32),
        (backend.IdSource(1).next_many(0), np.int64),
    ]:
        assert (len(column), column.dtype) == (0, dtype)
    assert backend.xor_by_parent(none, none, 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "as_column",
    [
        lambda a: a.view(np.uint64),
        memoryview,
        lambda a: array.array("q", a.tolist()),
        lambda a: np.concatenate([a, a])[: len(a)],
        lambda a: np.frombuffer(a.tobytes(), np.int64),
        lambda a: pytest.importorskip("pyarrow").array(a),
        lambda a: pytest.importorskip("pyarrow").array([0, *a.tolist(), 0]).slice(1, len(a)),
    ],
    ids=["uint64", "memoryview", "array.array", "slice", "read-only", "arrow", "arrow slice"],
)
def test_columns_of_all_kinds_are_taken(backend, as_column):
    words = np.array([0, 1, 2**40, 2**41 + 7])
    column = as_column(words)
    assert backend.root_ids(3, 1, column, 2).tolist() == backend.root_ids(3, 1, words, 2).tolist()
    expected = backend.edge_ids(3, words, "b", words, words).tolist()
    assert backend.edge_ids(3, column, "b", column, column).tolist() == expected
    assert backend.acker_task(column, 5).tolist() == backend.acker_task(words, 5).tolist()
    rows = as_column(np.array([3, 1, 1, 0]))
    assert backend.xor_by_parent(rows, column, 4).tolist() == [2**41 + 7, 2**40 + 1, 0, 0]


def test_spout_keys_keep_their_parts_apart():
    arguments = [(1, "ab", "c", 0), (1, "a", "bc", 0), (1, "", "abc", 0), (1, "abc", "", 0)]
    arguments += [(1, "ab", "c", 1), (2, "ab", "c", 0)]
    assert len({ackcore.ids.spout_key(*each) for each in arguments}) == len(arguments)


@pytest.mark.parametrize("bits", [4, 7, 10])
def test_trees_close_early_as_often_as_chance_has_it(backend, bits):
    """With edges cut to w bits, a proper part of a tree's messages cancels with odds 2**-w.

    Any two such parts are independent, so the count is as narrow as a binomial one; the keys
    are fixed, so this passes always or never.
    """
    trees, key = 4_000, 2024
    roots = backend.root_ids(key, 0, np.arange(trees), 0)
    spout = backend.edge_ids(key, roots, "lines", 0, 0)
    of_three = np.repeat(np.arange(trees), 3)
    roots_3 = roots[of_three]
    split = backend.edge_ids(key, roots_3, "split", spout[of_three], np.tile(np.arange(3), trees))
    count = backend.edge_ids(key, roots_3, "count", split, 0)
    messages = np.column_stack(
        [
            spout,  # INIT
            spout ^ backend.xor_by_parent(of_three, split, trees),
            (split ^ count).reshape(trees, 3),
            count.reshape(trees, 3),
        ]
    )
    # Each tree's messages arrive in an order of its own.
    order = np.argsort(
        backend.IdSource(key).next_many(messages.size).reshape(messages.shape), axis=1
    )
    arrived = np.take_along_axis(messages, order, axis=1)
    prefixes = np.bitwise_xor.accumulate(arrived, axis=1)
    assert not prefixes[:, -1].any()
    proper = prefixes[:, :-1]
    assert (proper != 0).all()

    odds = 2.0**-bits
    for low_bit in (0, 64 - bits):
        closed = (proper >> low_bit & (2**bits - 1)) == 0
        for early, chances in [(closed.sum(), closed.size)] + [
            (column.sum(), trees) for column in closed.T
        ]:
            assert abs(early - chances * odds) <= 5 * np.sqrt(chances * odds * (1 - odds))


# --- Arguments of ids are refused by name, with the row and the value, alike by both backends.


OFFSET = np.array([5, 6, 7])
TASK = np.array([1, 2, 3], np.int32)
REFUSED = {
    "partition too big": (ValueError, "partition must be in 0..65535, got 65536",
                          lambda m: m.root_id(1, 2**16, 0, 0)),
    "partition far too big": (ValueError, f"partition must be in 0..65535, got {2**80}",
                              lambda m: m.root_id(1, 2**80, 0, 0)),
    "offset negative": (ValueError, f"offset must be in 0..{2**42 - 1}, got -1",
                        lambda m: m.root_id(1, 0, -1, 0)),
    "offset too big": (ValueError, f"offset must be in 0..{2**42 - 1}, got {2**42}",
                       lambda m: m.root_id(1, 0, 2**42, 0)),
    "attempt too big": (ValueError, "attempt must be in 0..63, got 64",
                        lambda m: m.root_id(1, 0, 0, 64)),
    "key too wide": (OverflowError, "key must fit in 64 bits",
                     lambda m: m.root_id(2**64, 0, 0, 0)),
    "key no int": (TypeError, "key must be an integer, got float",
                   lambda m: m.root_id(1.0, 0, 0, 0)),
    "partition no int": (TypeError, "partition must be an integer, got str",
                         lambda m: m.root_id(1, "0", 0, 0)),
    "a partition too big": (ValueError, "partitions must be in 0..65535, got 65536 in row 2",
                            lambda m: m.root_ids(1, TASK + np.int32([0, 0, 65533]), OFFSET, 0)),
    "a partition negative": (ValueError, "partitions must be in 0..65535, got -1 in row 1",
                             lambda m: m.root_ids(1, np.int32([0, -1, 2**16]), OFFSET, 0)),
    "an offset too big": (ValueError, f"offsets must be in 0..{2**42 - 1}, got {2**42} in row 2",
                          lambda m: m.root_ids(1, 0, np.array([0, 1, 2**42]), 0)),
    "an offset negative": (ValueError, f"offsets must be in 0..{2**42 - 1}, got -7 in row 0",
                           lambda m: m.root_ids(1, 0, np.array([-7, 1, 2**42]), 0)),
    "an attempt too big": (ValueError, "attempts must be in 0..63, got 64 in row 0",
                           lambda m: m.root_ids(1, 0, OFFSET, np.int32([64, 0, 0]))),
    "one partition too big": (ValueError, "partitions must be in 0..65535, got 65536",
                              lambda m: m.root_ids(1, 2**16, OFFSET, 0)),
    "one attempt negative": (ValueError, "attempts must be in 0..63, got -1",
                             lambda m: m.root_ids(1, 0, OFFSET, -1)),
    "partitions wide": (TypeError, "partitions must hold 32-bit signed integers, got items of "
                        "dtype <i8; cast the column to int32 first",
                        lambda m: m.root_ids(1, OFFSET, OFFSET, 0)),
    "offsets a list": (TypeError, "offsets must be an array or another buffer of 64-bit integers",
                       lambda m: m.root_ids(1, 0, [1, 2], 0)),
    "offsets one int": (TypeError, "offsets must be an array", lambda m: m.root_ids(1, 0, 5, 0)),
    "offsets strided": (ValueError, "offsets must be C-contiguous",
                        lambda m: m.root_ids(1, 0, np.arange(6)[::2], 0)),
    "offsets 2-d": (ValueError, "offsets must be one-dimensional",
                    lambda m: m.root_ids(1, 0, np.zeros((2, 2), np.int64), 0)),
    "root lengths": (ValueError, "partitions has 3 rows and offsets has 2",
                     lambda m: m.root_ids(1, TASK, OFFSET[:2], TASK)),
    "attempt lengths": (ValueError, "offsets has 3 rows and attempts has 2",
                        lambda m: m.root_ids(1, 1, OFFSET, TASK[:2])),
    "lengths before ranges": (ValueError, "must pair up",
                              lambda m: m.root_ids(1, TASK - np.int32(9), OFFSET[:2], 0)),
    "component bytes": (TypeError, "component must be an integer, got bytes",
                        lambda m: m.edge_id(1, 2, b"b", 3, 4)),
    "component too wide": (OverflowError, "component must fit in 64 bits",
                           lambda m: m.edge_id(1, 2, 2**64, 3, 4)),
    "ordinal negative": (ValueError, f"ordinal must be in 0..{2**63 - 1}, got -1",
                         lambda m: m.edge_id(1, 2, "b", 3, -1)),
    "ordinal too big": (ValueError, f"ordinal must be in 0..{2**63 - 1}, got {2**63}",
                        lambda m: m.edge_id(1, 2, "b", 3, 2**63)),
    "parent edge too wide": (OverflowError, "parent_edge must fit in 64 bits",
                             lambda m: m.edge_id(1, 2, "b", -(2**63) - 1, 0)),
    "root no int": (TypeError, "root_id must be an integer, got NoneType",
                    lambda m: m.edge_id(1, None, "b", 3, 0)),
    "an ordinal negative": (ValueError, f"ordinals must be in 0..{2**63 - 1}, got -2 in row 1",
                            lambda m: m.edge_ids(1, OFFSET, "b", 0, np.array([0, -2, 0]))),
    "edge lengths": (ValueError, "root_ids has 3 rows and ordinals has 2",
                     lambda m: m.edge_ids(1, OFFSET, "b", 0, OFFSET[:2])),
    "parent edges a float": (TypeError, "parent_edges must be an array",
                             lambda m: m.edge_ids(1, OFFSET, "b", 0.5, 0)),
    "parent beyond": (ValueError, "parents must be row numbers in 0..6, got 7 in row 2",
                      lambda m: m.xor_by_parent(OFFSET, OFFSET, 7)),
    "parent negative": (ValueError, "parents must be row numbers in 0..6, got -1 in row 0",
                        lambda m: m.xor_by_parent(np.array([-1]), np.array([1]), 7)),
    "no parents at all": (ValueError, "parents must be row numbers in no rows at all",
                          lambda m: m.xor_by_parent(np.array([0]), np.array([1]), 0)),
    "parents and edges": (ValueError, "parents has 3 rows and edges has 2",
                          lambda m: m.xor_by_parent(OFFSET, OFFSET[:2], 9)),
    "n negative": (ValueError, "n must be", lambda m: m.xor_by_parent(OFFSET, OFFSET, -1)),
    "no ackers": (ValueError, f"n must be in 1..{2**31 - 1}, got 0",
                  lambda m: m.acker_task(1, 0)),
    "no ackers for a column": (ValueError, f"n must be in 1..{2**31 - 1}, got -3",
                               lambda m: m.acker_task(OFFSET, -3)),
    "too many ackers": (ValueError, f"n must be in 1..{2**31 - 1}, got {2**31}",
                        lambda m: m.acker_task(1, 2**31)),
    "root too wide": (OverflowError, "root_ids must fit in 64 bits",
                      lambda m: m.acker_task(2**64, 3)),
    "root a string": (TypeError, "root_ids must be an array", lambda m: m.acker_task("1", 3)),
    "source key": (TypeError, "key must be an integer", lambda m: m.IdSource("k")),
    "source given": (ValueError, "given must be in", lambda m: m.IdSource(1, -1)),
    "source many": (ValueError, "n must be", lambda m: m.IdSource(1).next_many(-1)),
    "source used up": (OverflowError, "has no 1 left; use another key",
                       lambda m: m.IdSource(1, 2**64 - 1).next()),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_backends_refuse_in_the_same_words_that_name_the_argument_and_the_row(
    backend, reference, case
):
    error, words, call = REFUSED[case]
    refusals = []
    for each in (backend, reference):
        with pytest.raises(error) as refused:
            call(each)
        assert words in str(refused.value)
        refusals.append((refused.type, str(refused.value)))
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((2**64, "c", "t", 0), OverflowError, "deployment_key must fit in 64 bits"),
        ((0, b"c", "t", 0), TypeError, "component must be a str, got bytes"),
        ((0, "c", None, 0), TypeError, "topic must be a str, got NoneType"),
        ((0, "c", "t", -1), ValueError, "generation must be in"),
    ],
)
def test_spout_key_refuses_by_name(arguments, error, words):
    with pytest.raises(error, match=words):
        ackcore.ids.spout_key(*arguments)


# --- `IdSource` gives each id once, to any thread and copy, never 0.


SOURCE_VECTORS = [
    (0, [5434617698986110680, -5549554059275885359, -6179612650318789962]),
    (-1, [-759146631100185530, -5147267685359651389, 8385096148538945074]),
]


@pytest.mark.parametrize(("key", "expected"), SOURCE_VECTORS)
def test_source_vectors(backend, key, expected):
    source = backend.IdSource(key)
    assert [source.next() for _ in range(3)] == expected


def test_source_gives_each_id_once_to_all_threads(backend):
    source = backend.IdSource(99)
    drawn = []

    def draw():
        for _ in range(20):
            drawn.append([source.next()])
            drawn.append(source.next_many(37).tolist())

    run_threads(*[draw] * 4)
    together = [each for some in drawn for each in some]
    assert source.given == len(together) == 4 * 20 * 38
    assert len(set(together)) == len(together)
    assert set(together) == set(backend.IdSource(99).next_many(source.given).tolist())
    assert 0 not in together


def test_copied_source_goes_on_where_it_stood(backend):
    source = backend.IdSource(-7)
    before = [source.next(), *source.next_many(10).tolist()]
    copy = pickle.loads(pickle.dumps(source))
    assert (copy.key, copy.given) == (-7, 11)
    after = copy.next_many(50).tolist()
    assert after == source.next_many(50).tolist()
    assert not set(before) & set(after)
    assert repr(copy) == "IdSource(given=61)"


@given(ANY_BITS, st.integers(0, 2**64 - 3))
def test_sources_give_the_same_ids(native, reference, key, given_before):
    given = [
        backend.IdSource(key, given_before).next_many(2).tolist() for backend in (native, reference)
    ]
    assert given[0] == given[1]
    assert 0 not in given[0]


def test_refused_draw_takes_nothing(backend):
    source = backend.IdSource(1, 2**64 - 3)
    with pytest.raises(OverflowError, match="has no 3 left"):
        source.next_many(3)
    assert len(source.next_many(2)) == 2
    assert source.given == 2**64 - 1

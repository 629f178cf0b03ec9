"""`IdSource` gives each id once, to any thread and copy, never 0."""

import pickle
import threading

import pytest
from definitions import ANY_BITS, source_id
from hypothesis import given
from hypothesis import strategies as st

SOURCE_VECTORS = [
    (0, [5434617698986110680, -5549554059275885359, -6179612650318789962]),
    (-1, [-759146631100185530, -5147267685359651389, 8385096148538945074]),
]


@pytest.mark.parametrize(("key", "expected"), SOURCE_VECTORS)
def test_source_vectors(backend, key, expected):
    source = backend.IdSource(key)
    assert [source_id(key, nth) for nth in range(1, 4)] == expected
    assert [source.next() for _ in range(3)] == expected


def test_source_gives_each_id_once_to_all_threads(backend):
    source = backend.IdSource(99)
    drawn = []

    def draw():
        for _ in range(20):
            drawn.append([source.next()])
            drawn.append(source.next_many(37).tolist())

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
def test_source_is_what_is_defined(backend, key, given_before):
    source = backend.IdSource(key, given_before)
    expected = [source_id(key, given_before + 1), source_id(key, given_before + 2)]
    assert source.next_many(2).tolist() == expected
    assert 0 not in expected


def test_refused_draw_takes_nothing(backend):
    source = backend.IdSource(1, 2**64 - 3)
    with pytest.raises(OverflowError, match="has no 3 left"):
        source.next_many(3)
    assert len(source.next_many(2)) == 2
    assert source.given == 2**64 - 1

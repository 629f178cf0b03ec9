"""``ackcore dead``: lists, one letter, and letters that are sent again."""

from __future__ import annotations

import re

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from checkpoints import OPEN, died
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ackcore._arrow.shown import text_of
from ackcore.spark.base import letter_columns as letter_files
from ackcore.spark.base.schemas import LETTER
from ackcore.spark.dead_letters.letter_files import reading_letters
from ackcore.spark.dead_letters.letter_store import files_of
from ackcore.spark.dead_letters.listing import LetterFilter, LetterId, count_letters, list_letters
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.topology.tuples import Reason


def test_the_newest_come_first(ackcore, checkpoint, lines):
    found = lines(ackcore("dead", "list", checkpoint, "--json"))
    assert [each["letter"] for each in found] == [
        *(f"lines/1/{n}" for n in (2, 1, 0)),
        *(f"lines/0/{n}" for n in (3, 2, 1, 0)),
    ]
    assert found[0].keys() == {"letter", "spout", "sent", "request", *LETTER.names}
    assert (
        found[0].items()
        >= {
            "letter": "lines/1/2",
            "spout": "lines",
            "batch_id": 1,
            "message_id": "id-6",
            "attempts": 5,
            "component": "enrich",
            "error_type": "TimeoutError",
            "error_message": "3 s",
            "first_ms": 6,
            "last_ms": 7,
            "replays": 0,
            "sent": 0,
            "request": None,
        }.items()
    )
    found = lines(ackcore("dead", "list", checkpoint, "--json", "--payload", "--limit", 1))
    assert [each["record"] for each in found] == [{"value": "line 6"}]


@pytest.mark.parametrize(
    ("options", "many"),
    [
        ([], 7),
        (["--component", "split"], 2),
        (["--error", "TimeoutError"], 5),
        (["--message", "[BOLD]"], 2),
        (["--message", "(no"], 0),
        (["--since", "1970-01-01T00:00:00.005+00:00"], 3),
        (["--until", "1970-01-01T00:00:00.005+00:00"], 4),
        (["--since", "2 d ago"], 0),
        (["--spout", "lines", "--component", "enrich", "--until", "5min"], 5),
        (["--sent"], 0),
        (["--not-sent"], 7),
        (["--limit", "2"], 2),
        (["--limit", "0"], 7),
    ],
)
def test_filters(ackcore, checkpoint, lines, options, many):
    assert len(lines(ackcore("dead", "list", checkpoint, "--json", *options))) == many


def test_wrong_filters_are_refused(ackcore, checkpoint):
    said = ackcore("dead", "list", checkpoint, "--spout", "line", code=2).stderr
    assert "spout must be one of clicks, lines, got 'line'" in said
    for text in ("soon", f"{'9' * 400}d"):
        said = ackcore("dead", "list", checkpoint, "--since", text, code=2).stderr
        assert "--since and --until must be a time such as 2026" in said
    for option in ("--message", "--error", "--component"):
        for command in (["list"], ["replay", "--dry-run"], ["drop"]):
            said = ackcore("dead", *command, checkpoint, option, " ", code=2).stderr
            assert f"{option} must not be blank, got ' '; omit it to match all" in said
    said = ackcore("dead", "show", checkpoint, "lines/1", code=2).stderr
    assert "SPOUT/MICRO-BATCH/NUMBER" in said


def test_the_table_shows_what_records_say_and_obeys_nothing(ackcore, checkpoint):
    said = ackcore("dead", "list", checkpoint, "--limit", "4", "--payload").stdout
    assert "\\x1b[31m[bold]<b>no</b>\\nnext" in said.replace("\n", "") or "lines/0/3" in said
    assert "\x1b" not in said
    assert "the newest 4 of 7; --limit shows more" in said
    assert "--limit" not in ackcore("dead", "list", checkpoint, "--limit", "7").stdout
    said = ackcore("dead", "list", checkpoint, "--component", "x").stdout
    assert said == "no dead letter of 7 matches\n"
    assert ackcore("dead", "replay", checkpoint, "--error", "TimeoutErr").stdout == said
    ackcore("dead", "drop", checkpoint, "--all")
    said = ackcore("dead", "list", checkpoint, "--component", "x").stdout
    assert said == "there are no dead letters\n"


def test_one_letter(ackcore, checkpoint, lines):
    said = ackcore("dead", "show", checkpoint, "lines/0/2").stdout
    assert '"value": "line 2"' in said
    assert "\x1b" not in said
    (found,) = lines(ackcore("dead", "show", checkpoint, "lines/0/2", "--json"))
    assert found["error_message"] == "\x1b[31m[bold]<b>no</b>\nnext"
    said = ackcore("dead", "show", checkpoint, "lines/0/4", code=1).stderr
    assert said == "ackcore: the checkpoint has no dead letter lines/0/4\n"


def test_letters_are_sent_again_once(ackcore, checkpoint, lines):
    said = ackcore("dead", "replay", checkpoint, code=2).stderr  # not all of them by mistake
    assert "LETTER" in said
    assert "--component" in said
    said = ackcore("dead", "replay", checkpoint, "lines/1/1", "lines/0/0", "--dry-run").stdout
    assert said == "2 dead letters would be sent: 2 of lines\n"
    assert len(lines(ackcore("dead", "list", checkpoint, "--json", "--sent"))) == 0
    said = ackcore("dead", "replay", checkpoint, "lines/1/1", "lines/0/0", "--request", "r").stdout
    assert said == "2 dead letters are sent again (2 of lines), request r\n"
    sent = lines(ackcore("dead", "list", checkpoint, "--json", "--sent"))
    assert [(each["letter"], each["request"]) for each in sent] == [
        ("lines/1/1", "r"),
        ("lines/0/0", "r"),
    ]
    done = lines(ackcore("dead", "replay", checkpoint, "--error", "TimeoutError", "--json"))
    assert done[0]["records"] == {"lines": 4}
    assert ackcore("dead", "replay", checkpoint, "--all").stdout.startswith("1 dead letter is")
    assert ackcore("dead", "replay", checkpoint, "--all").stdout == (
        "no dead letter is sent: of those that match, 7 were sent before (--again sends them "
        "once more)\n"
    )
    (status,) = lines(ackcore("status", checkpoint, "--json"))
    assert (status["requests"], status["dead"]["sent"]) == (3, 7)
    assert status["dead"]["reasons"] == []


def test_letters_that_came_back_too_often_are_left_out(ackcore, checkpoint, lines):
    again = ("dead", "replay", checkpoint, "lines/1/1", "--again")
    for _ in range(2):
        assert ackcore(*again, "--max-replays", 2).stdout.startswith("1 dead letter is sent")
    (said,) = lines(ackcore(*again, "--max-replays", 2, "--json", code=1))
    assert (said["records"], said["left_out"]) == ({}, {"lines": 1})
    said = ackcore(*again, "--max-replays", 2, code=1).stdout
    assert said == "1 dead letter is skipped: replayed 2 times or more\n"
    said = ackcore("dead", "replay", checkpoint, "--all", "--again", "--max-replays", 2).stdout
    assert "2 times or more\n6 dead letters are sent again (6 of lines)" in said
    assert ackcore(*again, "--max-replays", 0).stdout.startswith("1 dead letter is sent")
    (found,) = lines(ackcore("dead", "show", checkpoint, "lines/1/1", "--json"))
    assert (found["replays"], found["sent"]) == (0, 3)
    shown = ackcore("dead", "list", checkpoint).stdout
    assert re.search(r"attempts +replays before +replays since +message", shown)
    assert re.search(r"lines/1/1 .* 5 +- +3 +", shown)


def test_dropped_letters_are_not_there_any_more(ackcore, checkpoint, lines):
    ackcore("dead", "drop", checkpoint, code=2)
    said = ackcore("dead", "drop", checkpoint, "--component", "split", "--dry-run").stdout
    assert said == "2 dead letters would be dropped\n"
    assert len(lines(ackcore("dead", "list", checkpoint, "--json"))) == 7
    ackcore("dead", "replay", checkpoint, "lines/0/1", "lines/0/2")
    said = ackcore("dead", "drop", checkpoint, "--component", "split").stdout
    assert said == "2 dead letters were dropped\n"
    left = [each["letter"] for each in lines(ackcore("dead", "list", checkpoint, "--json"))]
    assert left == ["lines/1/2", "lines/1/1", "lines/1/0", "lines/0/3", "lines/0/1"]
    ackcore("dead", "show", checkpoint, "lines/0/0", code=1)
    (status,) = lines(ackcore("status", checkpoint, "--json"))
    assert (status["dead"]["letters"], status["dead"]["sent"]) == (5, 1)
    assert [each["component"] for each in status["dead"]["reasons"]] == ["enrich"]
    # Neither the rest nor, with --again, all take what was dropped along.
    (sent,) = lines(ackcore("dead", "replay", checkpoint, "--all", "--json", "--dry-run"))
    assert sent["records"] == {"lines": 4}
    (sent,) = lines(
        ackcore("dead", "replay", checkpoint, "--all", "--again", "--json", "--dry-run")
    )
    assert sent["records"] == {"lines": 5}
    (dropped,) = lines(ackcore("dead", "drop", checkpoint, "--all", "--json"))
    assert dropped["records"] == {"lines": 5}
    assert "0 dead letters were" in ackcore("dead", "drop", checkpoint, "--all").stdout
    said = ackcore(
        "dead", "replay", checkpoint, "--all", "--request", dropped["request"], code=2
    ).stderr
    assert "request must be a new id" in said


@pytest.mark.parametrize("command", ["replay", "drop"])
def test_who_names_a_letter_that_is_not_there_is_told_so_by_the_exit_code(
    ackcore, checkpoint, command
):
    ackcore("dead", command, checkpoint, "lines/99/0", "--dry-run", code=1)
    ackcore("dead", command, checkpoint, "lines/99/0", "--json", code=1)
    ackcore("dead", command, checkpoint, "lines/99/0", "lines/0/0", "--dry-run")
    ackcore("dead", command, checkpoint, "--error", "NoSuchError", "--dry-run")


def test_damage_is_told_of_and_hides_no_other_letters(ackcore, checkpoint, lines):
    (file,) = (checkpoint / "ackcore/dead_letters/lines").glob("batch-1.*.parquet")
    file.write_bytes(file.read_bytes()[:-9])
    done = ackcore("dead", "list", checkpoint, "--json", code=3)
    assert [each["letter"] for each in lines(done)] == [f"lines/0/{n}" for n in (3, 2, 1, 0)]
    assert f"{file} is damaged" in done.stderr
    done = ackcore("dead", "list", checkpoint, "--limit", 3, code=3)
    assert "the newest 3 of 4" in done.stdout
    assert done.stderr.count("\n") == 1
    assert "id-2" in ackcore("dead", "show", checkpoint, "lines/0/2").stdout
    assert f"{file} is damaged" in ackcore("dead", "show", checkpoint, "lines/1/0", code=3).stderr
    done = ackcore("status", checkpoint, code=3)
    assert "dead letters: 4," in done.stdout
    assert f"{file} is damaged" in done.stdout
    (found,) = lines(ackcore("status", checkpoint, "--json", code=3))
    assert (found["dead"]["letters"], found["waiting"]["records"]) == (4, 3)
    assert f"{file} is damaged" in found["dead"]["damaged"][0]
    next(file.parent.glob("batch-0.*.parquet")).unlink()
    assert "dead letters NOT COUNTED: " in ackcore("status", checkpoint, code=3).stdout


REASONS = [Reason("a", "E", "one"), Reason("b", "E", "two"), Reason("a", "F", "One")]
MAYBE = st.none() | st.sampled_from(["a", "b", "E", "F", "on", "lines", "clicks"])
TIMES = st.none() | st.integers(0, 40) | st.sampled_from([-(10**20), 10**20])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(MAYBE, MAYBE, MAYBE, MAYBE), st.tuples(TIMES, TIMES), st.integers(0, 40))
def test_filters_are_those_of_plain_python(many_letters, texts, times, limit):
    """With row groups of seven letters, of three micro-batches, two of them in one file."""
    store, every = many_letters
    spout, component, kind, message = texts
    wanted = LetterFilter(None, spout, component, kind, message, *times)
    expected = [
        each
        for each in every
        if spout in (None, each[0])
        and component in (None, each[1].component)
        and kind in (None, each[1].type)
        and (message or "").lower() in each[1].message.lower()
        and (times[0] is None or each[2] >= times[0])
        and (times[1] is None or each[2] < times[1])
    ]
    found = list(list_letters(store, wanted, payload=True))
    assert count_letters(store, wanted) == len(found)
    assert sorted((each.id.spout, each.last_ms) for each in found) == sorted(
        (each[0], each[2]) for each in expected
    )
    assert [each.id.batch_id for each in found] == sorted(
        (each.id.batch_id for each in found), reverse=True
    )
    assert list(list_letters(store, wanted, limit, payload=True)) == found[:limit]
    some = tuple(each.id for each in found[::2])
    named = list(list_letters(store, LetterFilter(some), payload=True))
    assert named == found[::2]


@pytest.fixture(scope="module")
def many_letters(tmp_path_factory):
    path = tmp_path_factory.mktemp("letters") / "c"
    every = []
    with pytest.MonkeyPatch.context() as patch, OPEN(path) as state:
        patch.setattr(letter_files, "GROUP_ROWS", 7)
        store = DeadLetters.checked(path, state.deployment_key)()
        for number, first in enumerate((0, 15, 24)):
            dead = {"lines": died(first, 9, REASONS), "clicks": died(first, 4, REASONS)}
            for spout, table in dead.items():
                for n, last_ms in enumerate(table["_ackcore_last_ms"].to_pylist()):
                    every.append((spout, REASONS[n % 3], last_ms))
            store.write(number, dead)
    return store.place, every


def test_ids_are_read_back():
    assert LetterId.of(str(LetterId("a/b 1", 7, 0))) == LetterId("a/b 1", 7, 0)
    for wrong in ("a/1", "a/1/x", "/1/1", "a/1/-1", ""):
        with pytest.raises(ValueError, match="SPOUT/MICRO-BATCH/NUMBER"):
            LetterId.of(wrong)


def test_a_column_for_which_json_has_nothing_is_shown_as_python_does(tmp_path):
    table = (
        died(0, 1).drop_columns("value").append_column("value", pa.array([90], pa.duration("s")))
    )
    with OPEN(tmp_path / "c") as state:
        store = DeadLetters.checked(tmp_path / "c", state.deployment_key)()
        store.write(0, {"lines": table})
    (letter,) = list_letters(store.place, LetterFilter(), payload=True)
    assert letter.payload == '{"value": "0:01:30"}'


def test_values_that_python_cannot_show_are_shown_escaped_or_as_iso(ackcore, lines, tmp_path):
    """One such letter ended the list; the store keeps its bytes."""
    texts = text_of([b"plain", b"caf\xe9", None])
    times = pa.array([0, 10**18, None]).cast(pa.timestamp("us", "UTC"))
    table = died(0, 3).drop_columns("value")
    table = table.append_column("value", texts).append_column("at", times)
    table = table.append_column("key", pa.array(["köy\t1".encode(), b"\xff", b"\0"]))
    with OPEN(tmp_path / "c") as state:
        store = DeadLetters.checked(tmp_path / "c", state.deployment_key)()
        store.write(0, {"lines": table})
    found = lines(ackcore("dead", "list", tmp_path / "c", "--json", "--payload"))
    assert [each["record"] for each in found] == [
        {"value": None, "at": None, "key": "AA=="},
        {"value": "caf\\xe9", "at": "33658-09-27T01:46:40.000000+00:00", "key": "/w=="},
        {"value": "plain", "at": "1970-01-01T00:00:00+00:00", "key": "a8O2eQkx"},
    ]
    for name, key in ("0", "köy\\t1"), ("1", "base64:/w=="), ("2", "base64:AA=="):
        said = ackcore("dead", "show", tmp_path / "c", f"lines/0/{name}").stdout
        assert f'"key": "{key}"' in said
    assert "caf\\\\xe9" in ackcore("dead", "list", tmp_path / "c", "--payload").stdout
    assert "caf\\\\xe9" in ackcore("dead", "show", tmp_path / "c", "lines/0/1").stdout
    ((_, file),) = files_of(store.place)
    with reading_letters(file.path) as letters:
        kept = pc.struct_field(letters.read(["payload"])["payload"], "value")
    assert kept.combine_chunks().cast(pa.binary()).to_pylist() == [b"plain", b"caf\xe9", None]

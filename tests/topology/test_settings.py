"""Settings from code, a file and the environment; what is not known or not possible is refused."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import pydoc
import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackcore.topology import Settings

SECONDS = "a number of seconds"


class Poison(Exception):
    """An exception of a user's own."""


def load(tmp_path, text, environ=None, **overrides):
    path = tmp_path / "topology.toml"
    path.write_text(text, encoding="utf-8")
    return Settings.load(path, {} if environ is None else environ, **overrides)


def test_every_setting_is_described():
    text = inspect.getdoc(Settings)
    described = re.findall(r"^(\w+) : .*$", text, re.MULTILINE)
    assert tuple(described) == Settings.names()
    defaults = re.findall(r"^(\w+) : .*, default (\S+)$", text, re.MULTILINE)
    assert len(defaults) >= len(described) - 3  # those that are None by default
    for name, default in defaults:
        assert default == str(getattr(Settings(), name))


def test_settings_cannot_be_changed_and_can_be_pickled():
    settings = Settings(max_attempts=3, reject=[ValueError])
    with pytest.raises(FrozenInstanceError):
        settings.max_attempts = 4
    assert pickle.loads(pickle.dumps(settings)) == settings


# --- where they come from ------------------------------------------------------------------------


def test_a_keyword_counts_for_more_than_a_variable_and_that_for_more_than_the_file(tmp_path):
    text = "[ackcore]\nmax_attempts = 2\nbackoff_s = 20\nchunk_rows = 200\n[other]\nx = 1\n"
    environ = {"ACKCORE_BACKOFF_S": "30", "ACKCORE_CHUNK_ROWS": "300", "HOME": "/"}
    settings = load(tmp_path, text, environ, chunk_rows=400)
    assert settings == Settings(max_attempts=2, backoff_s=30.0, chunk_rows=400)


@pytest.fixture
def own_environment(monkeypatch):
    """Take out the variables of `make test` and of CI."""
    for name in [name for name in os.environ if name.startswith("ACKCORE_")]:
        monkeypatch.delenv(name)


def test_the_environment_is_the_process_own_unless_another_is_given(monkeypatch, own_environment):
    monkeypatch.setenv("ACKCORE_PARALLELISM", "7")
    assert Settings.load().parallelism == 7
    assert Settings.load(environ={}).parallelism is None


def test_the_environment_is_not_in_what_help_prints(monkeypatch, own_environment):
    """A default that is the environment itself is printed with all that is secret in it."""
    assert inspect.signature(Settings.load).parameters["environ"].default is None
    monkeypatch.setenv("ACKCORE_CHUNK_ROWS", "71")
    assert "ACKCORE_CHUNK_ROWS" not in pydoc.render_doc(Settings)
    assert Settings.load(environ=None).chunk_rows == 71


@given(
    st.fixed_dictionaries(
        {},
        optional={
            name: st.integers(1_000, 60_000)
            for name in Settings.names()
            if name not in ("reject", "max_attempts")
        }
        | {"max_attempts": st.integers(1, 60)},
    )
)
def test_every_setting_can_come_from_anywhere(tmp_path_factory, chosen):
    chosen.setdefault("max_backoff_s", 60_000)
    chosen["max_backoff_s"] = max(chosen["max_backoff_s"], chosen.get("backoff_s", 0))
    expected = Settings(**chosen)
    environ = {f"ACKCORE_{name.upper()}": str(value) for name, value in chosen.items()}
    lines = [f"{name} = {json.dumps(value)}" for name, value in chosen.items()]
    path = tmp_path_factory.mktemp("settings")
    assert load(path, "\n".join(["[ackcore]", *lines])) == expected
    assert Settings.load(environ=environ) == expected
    assert Settings.load(environ={}, **chosen) == expected


def test_what_the_package_reads_elsewhere_is_no_setting():
    root = Path(__file__).parents[2]
    if not (root / "pyx").is_dir():
        pytest.skip("a wheel has no pyx/")
    sources = [*(root / "ackcore").rglob("*.py"), *(root / "pyx").glob("*.pyx")]
    variable = re.compile(r"""(?:environ(?:\.get\(|\[)|VARIABLE = )["'](ACKCORE_[A-Z0-9_]+)""")
    found = {name for path in sources for name in variable.findall(path.read_text("utf-8"))}
    assert found == {f"ACKCORE_{name}" for name in ("BACKEND", "CPU", "FAILPOINTS", "UI_TOKEN")}
    assert Settings.load(environ=dict.fromkeys(found, "1")) == Settings()


# --- reject --------------------------------------------------------------------------------------


def test_reject_takes_classes_and_names_and_holds_classes(tmp_path):
    expected = (ValueError, json.JSONDecodeError, UnicodeDecodeError)
    names = ["ValueError", "json.JSONDecodeError", "builtins.UnicodeDecodeError"]
    assert Settings(reject=[ValueError, *names[1:]]).reject == expected
    assert Settings.load(environ={"ACKCORE_REJECT": " , ".join(names) + ","}).reject == expected
    assert load(tmp_path, f"[ackcore]\nreject = {json.dumps(names)}").reject == expected
    assert Settings.load(environ={"ACKCORE_REJECT": ""}).reject == ()
    assert Settings(reject={Poison}).reject == (Poison,)


@pytest.mark.parametrize(
    ("reject", "error", "message"),
    [
        (ValueError, TypeError, "reject must be a list of exception classes or of their names"),
        ("ValueError", TypeError, "got str 'ValueError'; put it in brackets"),
        (5, TypeError, "got int 5; write a list such as ['TimeoutError'], or () for none"),
        (None, TypeError, "got NoneType None; write a list"),
        (map(str, ["OSError"]), TypeError, "; pass list(...)"),
        (["ValueEror"], ValueError, "reject has 'ValueEror', which cannot be found"),
        (["json.NoSuch"], ValueError, "reject has 'json.NoSuch', which cannot be found"),
        (["no_such_module.Class"], ValueError, "or 'package.module.Class'"),
        (["not a name"], ValueError, "which cannot be found"),
        ([""], ValueError, "reject has '', which cannot be found"),
        (["print"], ValueError, "reject must hold classes derived from Exception, got 'print'"),
        (["json.loads"], ValueError, "got 'json.loads'; remove it"),
        ([KeyboardInterrupt], ValueError, "got <class 'KeyboardInterrupt'>"),
        ([3], ValueError, "reject must hold classes derived from Exception, got 3"),
    ],
)
def test_what_is_no_exception_cannot_be_rejected(reject, error, message):
    with pytest.raises(error, match=re.escape(message)):
        Settings(reject=reject)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("KeyErr", "ACKCORE_REJECT in the environment has 'KeyErr', which cannot be found"),
        ("print", "ACKCORE_REJECT in the environment must hold classes derived from Exception"),
    ],
)
def test_the_variable_of_reject_is_called_by_its_name(text, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Settings.load(environ={"ACKCORE_REJECT": text})


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "must_be"),
    [
        ("max_attempts", 0, "an integer in 1..60"),
        ("max_attempts", 61, "an integer in 1..60"),
        ("backoff_s", 0.0009, f"{SECONDS} in 0.001..31622400"),
        ("max_backoff_s", 31_622_401, f"{SECONDS} in 0.001..31622400"),
        ("max_backoff_s", float("inf"), f"{SECONDS} in 0.001..31622400"),
        ("unavailable_timeout_s", float("nan"), f"{SECONDS} in 0..31622400"),
        ("max_waiting", -1, "an integer of at least 0"),
        ("max_retries_per_batch", 0, "an integer of at least 1"),
        ("chunk_rows", 0, "an integer of at least 1"),
        ("max_sink_attempts", 0, "an integer of at least 1"),
        ("max_runs", 0, "an integer of at least 1"),
        ("careful_after", -1, "an integer of at least 0"),
        ("bolt_call_timeout_s", 0, f"{SECONDS} in 1..31622400, or None"),
        ("max_restarts", -1, "an integer of at least 0"),
        ("parallelism", 0, "an integer in 1..65536, or None"),
        ("parallelism", 65_537, "an integer in 1..65536, or None"),
    ],
)
def test_a_number_out_of_range_is_refused_wherever_it_comes_from(tmp_path, name, value, must_be):
    with pytest.raises(ValueError, match=f"^{name} must be {must_be}, got {value}$"):
        Settings(**{name: value})
    with pytest.raises(ValueError, match=f"^{name} in .*topology.toml must be {must_be}"):
        load(tmp_path, f"[ackcore]\n{name} = {value}")
    variable = f"ACKCORE_{name.upper()}"
    with pytest.raises(ValueError, match=f"^{variable} in the environment must be {must_be}"):
        Settings.load(environ={variable: str(value)})


@pytest.mark.parametrize("value", ["5", 5.0, True, None, [5]])
def test_a_number_is_an_integer(value):
    message = f"max_attempts must be an integer in 1..60, got {type(value).__name__} {value!r}"
    with pytest.raises(TypeError, match=re.escape(message)):
        Settings(max_attempts=value)


def test_the_file_has_numbers_and_not_their_text(tmp_path):
    with pytest.raises(TypeError, match=r"max_attempts in .*topology.toml must be .* got str '5'"):
        load(tmp_path, '[ackcore]\nmax_attempts = "5"')
    with pytest.raises(TypeError, match=r"reject in .*topology.toml must be a list"):
        load(tmp_path, '[ackcore]\nreject = "ValueError"')


@pytest.mark.parametrize("text", ["", "five", "5.0", "none"])
def test_a_variable_is_an_integer(text):
    message = (
        f"ACKCORE_MAX_ATTEMPTS in the environment must be an integer in 1..60, got {text!r}; "
        "unset it for the default"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        Settings.load(environ={"ACKCORE_MAX_ATTEMPTS": text})


def test_the_doubling_stops_where_it_has_begun():
    assert Settings(backoff_s=0.007, max_backoff_s=0.007)
    with pytest.raises(
        ValueError, match=r"max_backoff_s must be at least backoff_s, got 0.006 and"
    ):
        Settings(backoff_s=0.007, max_backoff_s=0.006)


@pytest.mark.parametrize(
    ("unknown", "way_out"),
    [
        ("max_attemps", "did you mean 'max_attempts'?"),
        ("MAX_ATTEMPTS", "did you mean 'max_attempts'?"),
        ("backoff", "did you mean 'backoff_s'?"),
        ("zebra", "the settings are 'max_attempts', 'backoff_s'"),
    ],
)
def test_an_unknown_setting_is_named_with_its_near_miss(tmp_path, unknown, way_out):
    with pytest.raises(TypeError, match=re.escape(f"{unknown!r} is not a setting; {way_out}")):
        Settings.load(environ={}, **{unknown: 1})
    message = f"topology.toml: [ackcore] has {unknown!r}, which is not a setting; {way_out}"
    with pytest.raises(ValueError, match=re.escape(message)):
        load(tmp_path, f"[ackcore]\n{unknown} = 1")


@pytest.mark.parametrize(
    ("unknown", "near"),
    [
        ("ACKCORE_MAX_ATTEMPS", "ACKCORE_MAX_ATTEMPTS"),
        ("ACKCORE_BACKOF_S", "ACKCORE_BACKOFF_S"),
        ("ACKCORE_max_attempts", "ACKCORE_MAX_ATTEMPTS"),
        ("ACKCORE_BACKENDS", "ACKCORE_BACKEND"),
    ],
)
def test_an_unknown_variable_is_named_with_its_near_miss(unknown, near):
    message = f"{unknown} in the environment is not a setting; did you mean {near!r}?"
    with pytest.raises(ValueError, match=re.escape(message)):
        Settings.load(environ={unknown: "1"})


def test_all_unknown_settings_of_one_place_are_named_at_once(tmp_path):
    unknown = {"max_attemps": 1, "chunk_rows": 2, "back_off_ms": 3}
    near = ["did you mean 'max_attempts'?", "did you mean 'backoff_s'?"]
    with pytest.raises(TypeError) as caught:
        Settings.load(environ={}, **unknown)
    assert str(caught.value).splitlines() == [
        "2 problems:",
        f"1. 'max_attemps' is not a setting; {near[0]}",
        f"2. 'back_off_ms' is not a setting; {near[1]}",
    ]
    with pytest.raises(ValueError, match="2 problems") as caught:
        load(tmp_path, "\n".join(["[ackcore]", *(f"{name} = 1" for name in unknown)]))
    _, first, second = str(caught.value).splitlines()
    assert first.endswith(f"[ackcore] has 'max_attemps', which is not a setting; {near[0]}")
    assert second.endswith(f"[ackcore] has 'back_off_ms', which is not a setting; {near[1]}")
    with pytest.raises(ValueError, match="2 problems") as caught:
        Settings.load(environ={"ACKCORE_MAX_ATTEMPS": "1", "ACKCORE_CHUNK_ROWS": "many"})
    assert str(caught.value).splitlines()[1:] == [
        "1. ACKCORE_CHUNK_ROWS in the environment must be an integer of at least 1, got 'many'; "
        "unset it for the default",
        "2. ACKCORE_MAX_ATTEMPS in the environment is not a setting; did you mean "
        "'ACKCORE_MAX_ATTEMPTS'?",
    ]


def test_a_variable_that_is_like_none_gets_the_list():
    with pytest.raises(ValueError, match=r"a setting; the variables are 'ACKCORE_MAX_ATTEMPTS', "):
        Settings.load(environ={"ACKCORE_ZEBRA": "1"})


def test_a_file_has_to_be_there_and_toml_and_have_the_table(tmp_path):
    with pytest.raises(FileNotFoundError):
        Settings.load(tmp_path / "none.toml", {})
    with pytest.raises(ValueError, match=r"topology.toml is not TOML: "):
        load(tmp_path, "max_attempts: 3")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[ackcore]\n# gr\xf6\xdfer\n")
    with pytest.raises(ValueError, match=r"latin.toml is not TOML: .*utf-8"):
        Settings.load(latin, {})
    with pytest.raises(
        ValueError,
        match=r"topology.toml must have a table \[ackcore\] with the settings; "
        r"did you mean 'akcore'\?",
    ):
        load(tmp_path, "[akcore]\nmax_attempts = 3")
    with pytest.raises(ValueError, match=r"the top-level names are 'max_attempts'"):
        load(tmp_path, "max_attempts = 3")
    with pytest.raises(ValueError, match=r"there are no top-level names"):
        load(tmp_path, "")
    with pytest.raises(ValueError, match=r"must have a table \[ackcore\]"):
        load(tmp_path, "ackcore = 3")

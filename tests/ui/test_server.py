"""The answers of the page's server, and who receives them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from checkpoints import OPEN, Topology, damage_head, died, run_one, with_dead_letters
from typer.testing import CliRunner

from ackcore.cli import ui_command as ui
from ackcore.cli.entry import MODULES
from ackcore.cli.reporting import app_of
from ackcore.spark.dead_letters.store import DeadLetters
from ackcore.spark.inspect.status import read_status
from ackcore.ui.server import PageServer

TOKEN = "a token ☠ of 24 letters"
JSON = {"Content-Type": "application/json"}


def ask(url, path="", body=None, **headers):
    """The status, the headers and the body of an answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"{url}{path}", data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as answer:
        with answer:
            return answer.code, answer.headers, answer.read()


def asked(url, path, body=None, **headers):
    status, _, text = ask(url, path, body, **headers)
    return status, json.loads(text)


def test_status_letters_and_topology(server, checkpoint):
    status, found = asked(server.url, "api/checkpoints")
    assert (status, found) == (200, {"checkpoints": [str(checkpoint)], "replay": True})
    status, found = asked(server.url, "api/0/status")
    assert status == 200
    assert (found["dead"]["letters"], found["waiting"]["records"]) == (7, 3)
    assert len(found["batches"]) == 60
    status, found = asked(server.url, "api/0/letters?component=split&limit=1")
    assert [each["id"] for each in found["letters"]] == ["lines/0/2"]
    assert "<script>" in json.loads(found["letters"][0]["payload"])["value"]
    status, headers, svg = ask(server.url, "api/0/topology.svg")
    assert headers["Content-Type"] == "image/svg+xml"
    texts = [text.text for text in ElementTree.fromstring(svg.decode()).iter() if text.text]
    assert "60,000" in texts  # of 60 micro-batches
    assert "228,000" in texts


def test_the_topology_takes_one_status_and_not_in_the_event_loop(server, monkeypatch):
    """A store may answer late, and all other requests would wait."""
    threads = []

    def reading(*args, **keywords):
        threads.append(threading.current_thread().name)
        return read_status(*args, **keywords)

    monkeypatch.setattr("ackcore.ui.server.read_status", reading)
    monkeypatch.setattr("ackcore.ui.server._EVERY_S", 0)
    assert ask(server.url, "api/0/topology.svg")[0] == 200
    assert len(threads) == 1
    assert threads != ["ackcore-ui"]


@pytest.mark.parametrize("path", ["", "page.js", "page.css", "api/0/status", "api/9/status"])
def test_every_answer_keeps_other_pages_out(server, path):
    _, headers, _ = ask(server.url, path)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


def test_what_is_not_there(server):
    assert asked(server.url, "api/9/status")[0] == 404
    assert ask(server.url, "server.py")[0] == 404
    assert ask(server.url, "..%2Fguard.py")[0] == 404
    assert asked(server.url, "api/0/letters?since_ms=soon")[0] == 400


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8440", "127.0.0.1.evil.example", ""]
)
def test_another_name_for_this_server_is_refused(server, host):
    assert ask(server.url, "api/0/status", Host=host)[0] == 403
    port = server.url.rsplit(":", 1)[1].strip("/")
    for known in (f"localhost:{port}", f"127.0.0.1:{port}", "LOCALHOST", f"[::1]:{port}"):
        assert ask(server.url, "api/0/status", Host=known)[0] == 200


@pytest.mark.parametrize(
    ("host", "at", "known", "unknown"),
    [
        ("0.0.0.0", "127.0.0.1", ["10.1.2.3", "0.0.0.0:80", "[fe80::1]:80", "db7"], ["[10.1.2.3]"]),
        ("::", "[::1]", ["10.1.2.3:80", "[2001:db8::1]", "[::]:80", "db7:80"], ["2001:db8::1"]),
        ("::1", "[::1]", ["[::1]:80", "localhost", "db7"], ["10.1.2.3", "[2001:db8::1]"]),
        ("127.0.0.2", "127.0.0.2", ["127.0.0.2:80", "db7"], ["10.1.2.3"]),
    ],
)
def test_it_is_asked_for_by_the_addresses_at_which_it_listens(checkpoint, host, at, known, unknown):
    with PageServer([checkpoint], host=host, hosts=["DB7"]) as server:
        url = f"http://{at}:{server.url.rsplit(':', 1)[1]}"
        assert ask(url, "api/0/status")[0] == 200
        for name in known:
            assert ask(url, "api/0/status", Host=name)[0] == 200
        for name in (*unknown, "evil.example", "1.2.3.4.evil.example", "[::1].evil.example:80"):
            assert ask(url, "api/0/status", Host=name)[0] == 403


@pytest.mark.parametrize("set_to", [None, "", " ", "mine"])
def test_a_new_token_is_printed_and_ones_own_is_not(checkpoint, monkeypatch, set_to):
    monkeypatch.delenv("ACKCORE_UI_TOKEN", raising=False)
    if set_to is not None:
        monkeypatch.setenv("ACKCORE_UI_TOKEN", set_to)
    made = []

    class Kept(PageServer):
        def __init__(self, checkpoints, **options):
            super().__init__(checkpoints, **options)
            made.append(options["token"])

        def wait(self):
            """It ends at once."""

    monkeypatch.setattr(ui, "PageServer", Kept)
    words = ["ui", str(checkpoint), "--port", "0", "--allow-replay", "--json"]
    done = CliRunner().invoke(app_of(MODULES), words)
    assert done.exit_code == 0, done.output
    (token,) = made
    assert token
    assert (token == "mine") == (set_to == "mine")
    assert json.loads(done.stdout)["token"] == (None if set_to == "mine" else token)


LETTERS = {"letters": ["lines/0/0", "lines/1/2"]}


def sent(server):
    return len(asked(server.url, "api/0/letters?sent=yes")[1]["letters"])


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer a token"}, 401),
        ({"Authorization": f"Basic {TOKEN}"}, 401),
        ({"Content_Type": "text/plain"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Host": "evil.example"}, 403),
    ],
)
def test_replays_are_refused_to_others(server, headers, status):
    # Headers are Latin-1 on the wire; the browser is asked with this token elsewhere.
    right = {"Authorization": "Bearer " + TOKEN.encode().decode("latin-1")}
    if status == 403:
        headers = {**right, **headers}
    headers = {"Content_Type": "application/json", **headers}
    headers = {
        name: value.encode().decode("latin-1") if "☠" in value else value
        for name, value in headers.items()
    }
    assert asked(server.url, "api/0/replay", LETTERS, **headers)[0] == status
    assert sent(server) == 0


def test_replays_with_the_token(checkpoint):
    with PageServer([checkpoint], token="abc") as server:
        right = {"Authorization": "Bearer abc", "Content_Type": "application/json"}
        origin = server.url.rstrip("/")
        status, found = asked(server.url, "api/0/replay", {**LETTERS, "dry_run": True}, **right)
        assert (status, found["records"], sent(server)) == (200, {"lines": 2}, 0)
        status, found = asked(server.url, "api/0/replay", LETTERS, **right, Origin=origin)
        assert (status, found["records"], sent(server)) == (200, {"lines": 2}, 2)
        assert found["left_out"] == {}
        for wrong in ({}, {"letters": []}, {"letters": ["x"]}, [], {"letters": 7}):
            assert asked(server.url, "api/0/replay", wrong, **right)[0] == 400


def test_without_a_token_nobody_replays(checkpoint):
    with PageServer([checkpoint]) as server:
        assert not asked(server.url, "api/checkpoints")[1]["replay"]
        for token in ("", "None"):
            headers = {"Authorization": f"Bearer {token}", "Content_Type": "application/json"}
            assert asked(server.url, "api/0/replay", LETTERS, **headers)[0] == 403


def test_several_checkpoints_and_none(tmp_path, checkpoint):
    with_dead_letters(tmp_path / "other")
    with PageServer([checkpoint, tmp_path / "other"]) as server:
        assert asked(server.url, "api/1/status")[1]["checkpoint"] == str(tmp_path / "other")
    with pytest.raises(FileNotFoundError):
        PageServer([tmp_path])


def test_a_checkpoint_that_is_damaged_is_told_of(checkpoint):
    with PageServer([checkpoint]) as server:
        damage_head(checkpoint, lambda data: b"{}")
        status, found = asked(server.url, "api/0/status")
        assert status == 503
        assert "head.json is damaged" in found["error"]


def test_a_search_that_finds_nothing_says_what_there_is(tmp_path):
    path = tmp_path / "checkpoint"
    lines = {"lines": pa.schema([("value", pa.string())])}
    with OPEN(path, Topology(lines=("value",))) as state:
        letters = DeadLetters.checked(path, state.deployment_key, None, lines, state.records)()
        with PageServer([path]) as server:
            _, found = asked(server.url, "api/0/letters?component=no")
            assert found == {
                "letters": [], "damaged": [], "none_found": "there are no dead letters", "limit": 50
            }  # fmt: skip
            dead = {"lines": died(0, 65)}
            letters.write(0, dead)
            run_one(state, 0, {}, dead)
            _, found = asked(server.url, "api/0/letters?component=no")
    assert found["none_found"] == "no dead letter of 65 matches"


def test_damaged_letters_are_told_of_beside_the_others(checkpoint):
    (file,) = (checkpoint / "ackcore/dead_letters/lines").glob("batch-1.*.parquet")
    file.write_bytes(file.read_bytes()[:-9])
    with PageServer([checkpoint]) as server:
        status, found = asked(server.url, "api/0/status")
        assert (status, found["dead"]["letters"]) == (200, 4)
        assert f"{file} is damaged" in found["dead"]["damaged"][0]
        status, found = asked(server.url, "api/0/letters")
        assert (status, len(found["letters"])) == (200, 4)
        assert f"{file} is damaged" in found["damaged"][0]


def test_it_ends(checkpoint):
    server = PageServer([checkpoint])
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        ask(server.url)


def test_where_it_cannot_listen_is_told_and_ends_nothing(checkpoint):
    def served(port, **options):
        return PageServer([checkpoint], port=port, **options)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says = rf"cannot be served at 127\.0\.0\.1:{port}: .*in use.* or 0 for any free one"
        with pytest.raises(OSError, match=says):
            served(port)
    says = r"cannot be served at 192\.0\.2\.1:0: .*'127\.0\.0\.1', or '0\.0\.0\.0' for all"
    with pytest.raises(OSError, match=says):
        served(0, host="192.0.2.1")


def test_the_command_says_where_it_is_as_json(checkpoint):
    command = [sys.executable, "-m", "ackcore.cli.entry", "ui", str(checkpoint), "--port", "0"]
    env = {name: value for name, value in os.environ.items() if name != "ACKCORE_UI_TOKEN"}
    with subprocess.Popen(
        [*command, "--allow-replay", "--json"], stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            said = json.loads(process.stdout.readline())
            assert asked(said["url"], "api/checkpoints")[1]["replay"]
            assert len(said["token"]) > 20
        finally:
            process.terminate()
    assert process.returncode == -signal.SIGTERM

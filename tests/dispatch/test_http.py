"""Endpoints: what each answer means, and what becomes of connections that break."""

import asyncio
import base64
import gc
import socket
from array import array
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from urllib.parse import urlsplit

import pytest
from scripted import turns

from ackcore.calls import Reject, Unavailable
from ackcore.dispatch import Dispatcher, Http
from ackcore.dispatch.http import HttpError
from ackcore.flow import Fixed

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Answers requests one by one with what a list holds; the last of it for ever."""

    def __init__(self, *answers):
        self.answers = list(answers) or [OK]
        self.bodies = []
        self.connections = 0
        self.writers = []

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/do?a=b"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.head = head
                fields = dict(line.split(b": ") for line in head.split(b"\r\n")[1:-2])
                self.bodies.append(await reader.readexactly(int(fields[b"Content-Length"])))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer is None:
                    return
                close = answer.endswith(b"*close")
                writer.write(answer.removesuffix(b"*close"))
                await writer.drain()
                if close:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def answer(status, *headers, body=b""):
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def calling(*answers, times=1, items=None, user="", **arguments):
    """Return the outcomes of calls to an endpoint with these answers, and the server."""
    items = [{"n": n} for n in range(times)] if items is None else items

    async def main():
        async with Server(*answers) as server:
            http = Http(server.url.replace("//", f"//{user}"), **arguments)
            try:
                return [await http.call(item) for item in items], server
            finally:
                await http.close()

    return asyncio.run(main())


def test_a_call_is_a_post_on_a_kept_connection():
    answers, server = calling(times=3, headers={"X-Key": "v"}, decode=lambda got: got.body)
    assert answers == [b"ok"] * 3
    assert server.bodies == [b'{"n": 0}', b'{"n": 1}', b'{"n": 2}']
    assert server.connections == 1
    assert server.head.startswith(b"POST /do?a=b HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nX-Key: v\r\n" in server.head


def head_of(item, headers=None, **arguments):
    """The header lines of a request with an item, without the first."""
    _, server = calling(items=[item], headers=headers, **arguments)
    return [line.split(": ") for line in server.head.decode().split("\r\n")[1:-2]]


@pytest.mark.parametrize(
    ("item", "headers", "encode", "kinds"),
    [
        ({"n": 1}, None, None, ["application/json"]),
        ([1], {"X-Key": "v"}, None, ["application/json"]),
        (None, None, None, ["application/json"]),
        ("text", None, None, []),
        (b"bytes", None, None, []),
        ({"n": 1}, None, lambda item: b"own", []),
        ({"n": 1}, {"content-TYPE": "application/x-ours"}, None, ["application/x-ours"]),
    ],
)
def test_what_is_sent_as_json_says_so(item, headers, encode, kinds):
    head = head_of(item, headers, encode=encode)
    assert [value for name, value in head if name.lower() == "content-type"] == kinds


def test_a_header_that_is_given_replaces_the_one_sent_by_itself():
    assert dict(head_of({}))["Accept-Encoding"] == "identity"  # else a server may choose gzip
    head = head_of({}, {"accept-encoding": "gzip"})
    assert [value for name, value in head if name.lower() == "accept-encoding"] == ["gzip"]
    head = head_of({}, {"host": "other", "AUTHORIZATION": "Bearer x"}, user="user:secret@")
    assert [value for name, value in head if name.lower() == "host"] == ["other"]
    assert [value for name, value in head if name.lower() == "authorization"] == ["Bearer x"]
    for headers in ({"content-length": "1"}, {"Transfer-Encoding": "chunked"}, {"a": "", "A": ""}):
        with pytest.raises(ValueError, match="headers must have each name once, and neither"):
            Http("http://host", headers=headers)


def test_a_user_in_the_url_is_sent_and_not_shown():
    head = dict(head_of({}, user="j%C3%B6rg:p%40ss%3Aword@"))
    assert base64.b64decode(head["Authorization"].split()[1]).decode() == "jörg:p@ss:word"
    assert "@" not in head["Host"]
    with pytest.raises(HttpError) as refused:
        calling(answer(403), user="user:secret@")
    assert "secret" not in str(refused.value)
    with pytest.raises(ValueError, match="got 'ftp://host'"):
        Http("ftp://user:secret@host")


MEANINGS = {
    Reject: [400, 413, 422],
    HttpError: [301, 402, 403, 404, 405, 408, 409, 410, 421, 423, 425, 500, 520],
    Unavailable: [401, 407, 429, 502, 503, 504, 521, 522, 523, 524, 529, 530],
}


@pytest.mark.parametrize(
    ("status", "error"), [(each, error) for error, some in MEANINGS.items() for each in some]
)
def test_what_a_status_means(status, error):
    with pytest.raises(error, match=f"{status} from http://127.0.0.1.*: said so"):
        calling(answer(status, body=b"said so"))


def test_retry_after_is_seconds_or_a_date():
    later = format_datetime(datetime.now(UTC) + timedelta(hours=1), usegmt=True)
    far = "Fri, 31 Dec 9999 23:59:59 GMT"
    for value, least, most in (
        ("7", 7, 7),
        ("0", 0, 0),
        (later, 3500, 3600),
        ("-3", 0, 0),
        ("inf", 86400, 86400),
        ("1e300", 86400, 86400),
        (far, 86400, 86400),
        ("Mon, 01 Jan 2001 00:00:00 GMT", 0, 0),
    ):
        with pytest.raises(Unavailable) as caught:
            calling(answer(429, f"Retry-After: {value}"))
        assert least <= caught.value.after_s <= most
    for unknown in ("soon", "", "nan", "Mon, 01 Jan 99999999999999999999 00:00:00 GMT"):
        with pytest.raises(Unavailable) as caught:
            calling(answer(503, f"Retry-After: {unknown}"))
        assert caught.value.after_s is None


@pytest.mark.parametrize("asked", ["inf", "2e9", "-1", "nan", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_no_retry_after_ends_a_run(asked):
    async def main():
        sick = answer(503, f"Retry-After: {asked}")
        async with Server(sick, OK) as server, Server() as free:
            consumers = {"sick": Http(server.url), "free": Http(free.url)}
            return await Dispatcher(range(20), consumers, limit=lambda: Fixed(1)).run_async()

    counts = asyncio.run(main())
    assert (counts.acked, counts.unavailable) == (20, 1)


def test_a_record_that_the_server_dies_of_comes_to_its_end():
    dead = []

    class Fragile(Server):
        async def _serve(self, reader, writer):
            self.answers = [OK]
            await super()._serve(Crashes(reader), writer)

    class Crashes:
        def __init__(self, reader):
            self.readuntil, self._reader = reader.readuntil, reader

        async def readexactly(self, n):
            body = await self._reader.readexactly(n)
            if body == b"13":
                raise ConnectionError("killed by 13")
            return body

    async def main():
        async with Fragile() as server:
            return await Dispatcher(
                range(20),
                {"a": Http(server.url)},
                max_attempts=3,
                dead_letters=lambda position, record, error: dead.append((record, type(error))),
            ).run_async()

    counts = asyncio.run(asyncio.wait_for(main(), 30))
    assert dead == [(13, HttpError)]
    assert (counts.acked, counts.dead, counts.failed, counts.unavailable) == (19, 1, 3, 0)


def test_a_request_that_was_not_sent_whole_does_not_count():
    class Closes(Server):
        async def _serve(self, reader, writer):
            await reader.read(10)
            writer.close()

    async def main():
        async with Closes() as server:
            with pytest.raises(Unavailable, match="closed the connection without a response"):
                await Http(server.url).call(bytes(32 << 20))

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize("status", [100, 102, 103])
def test_an_informational_answer_is_passed_over(status):
    early = b"HTTP/1.1 %d Wait\r\nLink: </a>\r\n\r\n" % status
    answers, server = calling(early + early + OK, times=2, decode=lambda got: got.body)
    assert answers == [b"ok"] * 2
    assert server.connections == 1


def test_a_body_that_ends_with_the_connection_is_read_whole():
    half = asyncio.Event()

    class Halves(Server):
        async def _serve(self, reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nfirst ")
            await asyncio.wait_for(half.wait(), 30)
            writer.write(b"x" * 300_000 + b" last")
            writer.close()

    async def main():
        async with Halves() as server:
            http = Http(server.url, decode=lambda got: got.body)
            call = asyncio.ensure_future(http.call(""))
            await turns(1000)  # what came first is there to be read
            half.set()
            return await asyncio.wait_for(call, 30)

    assert asyncio.run(main()) == b"first " + b"x" * 300_000 + b" last"


def test_a_connection_that_was_closed_while_idle_is_replaced():
    answers, server = calling(OK + b"*close", OK, times=3)
    assert answers == [None] * 3
    assert server.connections == 2
    answers, server = calling(answer(200, "Connection: close"), times=3)
    assert server.connections == 3


@pytest.mark.parametrize(
    "late", [b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\n\r\n", OK, b"too long a body"]
)
def test_bytes_that_no_request_asked_for_do_not_answer_the_next(late):
    answers, server = calling(OK + late, OK, items=["a", "b"], decode=lambda got: got.body)
    assert (answers, server.bodies, server.connections) == ([b"ok"] * 2, [b"a", b"b"], 2)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_connection_of_another_loop_is_not_used():
    async def main():
        async with Server() as server:
            http = Http(server.url)

            def call(item):
                return asyncio.run(http.call(item))

            for item in "ab":  # each in a thread with a loop of its own
                await asyncio.to_thread(call, item)
            await http.close()  # in a third loop
            return server

    server = asyncio.run(main())
    gc.collect()  # here, where the warnings of connections that nobody closed are ignored
    assert (server.bodies, server.connections) == ([b"a", b"b"], 2)


def test_a_connection_is_not_kept_for_another_loop():
    """Two loops call at once, and the second one goes on."""
    other = asyncio.new_event_loop()

    async def main():
        async with Server(OK[:-1], OK) as server:
            http = Http(server.url)
            first = asyncio.ensure_future(http.call("a"))
            while not server.bodies:
                await asyncio.sleep(0)
            await asyncio.to_thread(other.run_until_complete, http.call("b"))
            server.writers[0].write(OK[-1:])
            await first
            await asyncio.to_thread(other.run_until_complete, http.call("c"))
            await asyncio.to_thread(other.run_until_complete, http.close())
            await asyncio.to_thread(other.run_until_complete, asyncio.sleep(0))
            return server

    server = asyncio.run(asyncio.wait_for(main(), 60))
    other.close()
    assert (server.bodies, server.connections) == ([b"a", b"b", b"c"], 2)


def test_bodies_come_in_each_form():
    def body(got):
        return got.body

    chunked = CHUNKED + b"4;x=y\r\nabcd\r\n2\r\nef\r\n0\r\n"
    answers, server = calling(chunked + b"T: 1\r\n\r\n", times=2, decode=body)
    assert answers == [b"abcdef"] * 2
    assert server.connections == 1
    answers, _ = calling(b"HTTP/1.0 200 OK\r\n\r\nto the end*close", decode=body)
    assert answers == [b"to the end"]
    twice = (
        HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\nTransfer-Encoding: identity\r\n\r\nok"
    )
    answers, server = calling(twice, times=2, decode=body)
    assert (answers, server.connections) == ([b"ok"] * 2, 1)
    assert calling(b"HTTP/1.1 204 No Content\r\n\r\n", times=2)[0] == [None, None]


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (None, "closed the connection without a response, after the whole"),
        (HEAD + b"Content-Length: 9\r\n\r\nab*close", "sent an incomplete"),
        (HEAD + b"X: *close", "sent an incomplete response"),
        (
            CHUNKED + b"2\r\nab\r\n*close",
            "sent an incomplete response: the connection ended within the body",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n*close", "sent an incomplete response"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "status 101 switches protocols"),
        (
            b"SSH-2.0-OpenSSH\r\n*close",
            "no valid HTTP/1 response: the response begins with b'SSH-2.0-Open",
        ),
        (HEAD + b"Content-Length: x\r\n\r\n", "the length 'x' of the response's body"),
        (HEAD + b"Content-Length: 1_0\r\n\r\n0123456789", "the length '1_0' of the"),
        (CHUNKED + b"0x2\r\nab\r\n0\r\n\r\n", "the length '0x2"),
        (
            HEAD + b"Content-Length: 2\r\ncontent-length: 3\r\n\r\nabc",
            "the response has two headers content-length, '2' and '3'",
        ),
        (
            HEAD + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "the response has two headers transfer-encoding, 'gzip' and 'chunked'",
        ),
        # Its end would only be that of the connection, which stays open.
        (
            HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "the response's Transfer-Encoding is 'gzip, chunked', not 'chunked'",
        ),
        (HEAD + b"Content-Length: 99999999999\r\n\r\n", "0..67108864 bytes, got"),
        (HEAD + b"X: " + bytes(99_999), "sent no valid HTTP/1 response: "),
        (
            HEAD + (b"X: " + bytes(60_000) + b"\r\n") * 20,
            "the response's headers have more than 1048576 bytes",
        ),
    ],
)
def test_what_is_no_answer_is_named(sent, says):
    with pytest.raises(HttpError) as caught:
        calling(sent)
    assert says in str(caught.value)
    assert str(caught.value).startswith("http://127.0.0.1:")


def test_a_cancelled_call_leaves_no_answer_for_the_next():
    async def main():
        async with Server(b"", OK) as server:
            http = Http(server.url, decode=lambda got: got.body)
            call = asyncio.ensure_future(http.call("slow"))
            while not server.bodies:
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            assert await http.call("next") == b"ok"
            assert server.connections == 2
            await http.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_without_a_server_it_is_unavailable():
    async def main():
        async with Server() as server:
            url = server.url
        with pytest.raises(Unavailable, match=r"no connection to http://127\.0\.0\.1"):
            await Http(url).call("x")

    asyncio.run(main())


def test_a_connection_that_hangs_is_unavailable(monkeypatch):
    async def hangs(*_, **__):
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", hangs)
    monkeypatch.setattr("ackcore.dispatch.http._CONNECT_S", 1e-3)
    with pytest.raises(
        Unavailable, match=r"no connection to http://\[::1\]/: none within 0\.001 s"
    ):
        asyncio.run(Http("http://[::1]/").call("a"))


def test_an_address_that_hangs_keeps_no_call_from_the_next(monkeypatch):
    """A host may have an IPv6 address that nothing routes, or one of a server that is gone."""
    connect, asked = asyncio.SelectorEventLoop.sock_connect, []

    async def hangs(loop, sock, address):
        asked.append(address)
        if address[0] == "fe80::1":
            await asyncio.Event().wait()
        return await connect(loop, sock, address)

    def found(host, port, *_):
        assert host == "two.example"
        v6, v4 = (socket.AF_INET6, ("fe80::1", port, 0, 1)), (socket.AF_INET, ("127.0.0.1", port))
        return [(family, socket.SOCK_STREAM, 6, "", address) for family, address in (v6, v4)]

    async def main():
        async with Server() as server:
            monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", hangs)
            monkeypatch.setattr(socket, "getaddrinfo", found)
            http = Http(server.url.replace("127.0.0.1", "two.example"))
            await http.call("a")
            await http.close()

    for name, value_s in (("_CONNECT_S", 0.5), ("_ADDRESS_S", 0.01)):
        monkeypatch.setattr(f"ackcore.dispatch.http.{name}", value_s)
    asyncio.run(asyncio.wait_for(main(), 60))
    assert [(address[0], address[2:]) for address in asked] == [
        ("fe80::1", (0, 1)),
        ("127.0.0.1", ()),
    ]


def test_an_address_that_fails_after_it_accepted_keeps_no_call_from_the_next(monkeypatch):
    connect, tried = asyncio.open_connection, []

    async def shaken(sock, **more):
        tried.append(sock)
        if len(tried) == 1:
            sock.close()
            raise ConnectionResetError("reset in the handshake")
        return await connect(sock=sock, **more)

    async def main():
        async with Server() as server:
            at = socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", urlsplit(server.url).port)
            monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [at, at])
            monkeypatch.setattr(asyncio, "open_connection", shaken)
            http = Http(server.url)
            await http.call("a")
            await http.close()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert len(tried) == 2


@pytest.mark.parametrize("encoded", ["text", array("f", [1.0]), None, 3])
def test_encode_must_return_bytes(encoded):
    with pytest.raises(TypeError, match=f"encode must return bytes, got {type(encoded).__name__}"):
        calling(encode=lambda item: encoded)


def test_functions_of_http_may_be_no_coroutines_and_decode_a_generator():
    for name in ("headers", "encode", "decode"):
        with pytest.raises(TypeError, match=f"{name} must be a plain function"):
            Http("http://x", **{name: asyncio.sleep})

    def lines(got):
        yield from got.body.split()

    ((read,), _) = calling(decode=lines)
    assert list(read) == [b"ok"]


def test_a_body_may_be_any_buffer_of_bytes():
    _, server = calling(encode=lambda item: memoryview(array("f", [1.0, 2.0])))
    assert server.bodies == [bytes(array("f", [1.0, 2.0]))]


def test_a_throttled_endpoint_is_left_alone_and_the_others_do_the_work():
    async def main():
        async with Server(answer(429, "Retry-After: 3600")) as busy, Server() as free:
            counts = await Dispatcher(
                range(200), {"busy": Http(busy.url), "free": Http(free.url)}, max_attempts=1
            ).run_async()
            return counts, len(busy.bodies), len(free.bodies)

    counts, busy, free = asyncio.run(main())
    assert counts.acked == free == 200
    assert counts.unavailable == busy < 5


@pytest.mark.parametrize(
    "url", ["http://h/a b", "http://h/naïve", "http://bücher/", "http://h?q=é"]
)
def test_a_url_that_is_not_encoded_is_refused(url):
    with pytest.raises(ValueError, match="url must be ASCII without spaces"):
        Http(url.replace("//", "//üser:p w@"))


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64])
def test_a_host_that_no_name_server_can_know_is_refused(host):
    with pytest.raises(ValueError, match="url must have a host whose parts between dots"):
        Http(f"http://user:secret@{host}/")
    Http(f"http://{'a' * 63}.b./")


@pytest.mark.parametrize("url", ["ftp://x", "localhost:80", "http://", "http:///path"])
def test_a_url_that_is_none_is_refused(url):
    with pytest.raises(ValueError, match="url must begin with http://host or https://host, got"):
        Http(url)


def test_headers_of_a_function_are_new_in_each_request():
    tokens = iter(["one", "two"])
    answers, server = calling(times=2, headers=lambda: {"Authorization": f"Bearer {next(tokens)}"})
    assert answers == [None, None]
    assert b"\r\nAuthorization: Bearer two\r\nContent-Type: application/json" in server.head
    with pytest.raises(Unavailable, match=r"headers\(\) of http://.* failed: StopIteration\(\)"):
        calling(headers=lambda: {"A": next(tokens)})
    for other in ("b\r\nC: d", "\u20ac"):
        with pytest.raises(Unavailable, match="must not hold line ends") as raised:
            calling(headers=lambda other=other: {"Authorization": "secret", "A": other})
        assert "secret" not in repr(raised.value) + repr(raised.value.__cause__)


def test_headers_cannot_be_smuggled_in():
    for name, value in (
        ("A", "b\r\nC: d"),
        ("A", "b\0"),
        ("A B", ""),
        ("A:", ""),
        ("", ""),
        ("A", "\u20ac"),
    ):
        with pytest.raises(ValueError, match=f"must not hold.*the others in header '{name}'$"):
            Http("http://x", headers={name: value})
    assert b"\r\nA-1: b\tc" in Http("http://x", headers={"A-1": "b\tc"})._head

"""A consumer behind HTTP: a record is a POST, and done when the answer is 2xx."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ackcore.calls import Reject, Unavailable
from ackcore.dispatch.consumers import Target

#: Answers that say "not now": too many requests, and a server that is down or behind one that is.
_NOT_NOW = frozenset({429, 502, 503, 504})
#: Client errors that another attempt may cure: time-out, conflict, too early.
_TRY_AGAIN = frozenset({408, 409, 425})
_JSON = b"\r\nContent-Type: application/json"
_MAX_BODY = 64 << 20
_LONGEST_S = 86_400.0


class Response(NamedTuple):
    """An answer."""

    status: int
    headers: Mapping[str, str]  # by lower-case name; of several of one name the last
    body: bytes


class HttpError(Exception):
    """An answer that is no success, or none that HTTP knows."""


class Http(Target):
    """An HTTP/1.1 endpoint.

    ======================  =============================================================
    2xx                     done
    429, 502, 503, 504      `Unavailable`, for as long as ``Retry-After`` asks for
    408, 409, 425, 5xx      failed
    any other               `Reject`: no endpoint will take it
    no connection           `Unavailable`
    none, or a broken one   failed: the record may be what the server died of
    ======================  =============================================================

    Informational answers (1xx) are passed over. Connections are kept, as many as there are calls at
    once. When a kept one ends before an answer begins, the request is sent once more, over a new
    one: most probably the server had closed it for being idle. A server that had begun with the
    record gets it twice then.

    Parameters
    ----------
    url : str
        ``http://`` or ``https://``. ``user:password@`` in it becomes a header ``Authorization``
        (Basic, UTF-8), and appears in no error.
    headers : mapping, optional
        Sent with each request. A header that Http also sends by itself is replaced, whatever the
        case of its letters.
    encode : callable, optional
        Makes the body, bytes, of an item. By default bytes and str are sent as they are, and
        everything else as JSON, with ``Content-Type: application/json``.
    decode : callable, optional
        Makes what `Target.call` returns of a `Response`; by default None, that is success.
    ssl_context : ssl.SSLContext, optional
        For https; by default Python's.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        encode: Callable[[Any], bytes] | None = None,
        decode: Callable[[Response], Any] | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            raise ValueError(f"url must begin with http://host or https://host, got {shown!r}")
        place = parts.netloc.rpartition("@")[2]
        self.url = parts._replace(netloc=place).geturl()
        secure = parts.scheme == "https"
        self._ssl = (ssl_context or ssl.create_default_context()) if secure else None
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        given = headers or {}
        own = {"Host": place}
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            own["Authorization"] = f"Basic {base64.b64encode(secret.encode()).decode()}"
        replaced = {name.lower() for name in given}
        if len(replaced) < len(given) or replaced & {"content-length", "transfer-encoding"}:
            raise ValueError(
                "headers must have each name once, and neither Content-Length nor "
                f"Transfer-Encoding, which Http sends by itself; got {', '.join(given)}"
            )
        sent = {name: value for name, value in own.items() if name.lower() not in replaced}
        self._names_json = encode is None and "content-type" not in replaced
        lines = [
            f"POST {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in (sent | dict(given)).items()),
        ]
        broken = [line for line in lines if "\r" in line or "\n" in line]
        if broken:
            raise ValueError(
                "url and headers must not hold line ends, which would end a header; got "
                f"{broken[0]!r}; encode or remove them"
            )
        self._head = "\r\n".join(lines).encode("latin-1")
        self._encode = _as_body if encode is None else encode
        self._decode = decode
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def call(self, item: Any) -> Any:
        """See `Target.call`."""
        body = self._encode(item)
        is_json = self._names_json and not isinstance(item, (bytes, bytearray, memoryview, str))
        response = await self._request(body, _JSON if is_json else b"")
        status = response.status
        if 200 <= status < 300:
            return None if self._decode is None else self._decode(response)
        said = f"{status} from {self.url}: {response.body[:200].decode('utf-8', 'replace')}"
        if status in _NOT_NOW:
            after_s = _retry_after_s(response.headers.get("retry-after"))
            raise Unavailable(said, after_s=after_s)
        if status in _TRY_AGAIN or status >= 500:
            raise HttpError(said)
        raise Reject(said)

    async def close(self) -> None:
        """See `Target.close`."""
        while self._idle:
            self._idle.pop()[1].close()

    async def _request(self, body: bytes, header: bytes) -> Response:
        length = b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        request = b"".join((self._head, header, length, body))
        while self._idle:
            reader, writer = self._idle.pop()
            if writer.is_closing() or reader.at_eof():
                writer.close()
                continue
            try:
                return await self._exchange(reader, writer, request)
            except _NoAnswer:
                break
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        except OSError as error:
            raise Unavailable(f"no connection to {self.url}: {error}") from error
        try:
            return await self._exchange(reader, writer, request)
        except _NoAnswer as error:
            said = f"{self.url} closed the connection without an answer"
            if error.sent_whole:
                raise HttpError(f"{said} to a whole request") from error
            raise Unavailable(said) from error

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
    ) -> Response:
        keep = False
        try:
            writer.write(request)
            sent = _is_sent(writer)
            try:
                try:
                    first = await reader.readline()
                except OSError as error:
                    raise _NoAnswer(sent()) from error
                if not first:
                    raise _NoAnswer(sent())
                response, keep = await _read_response(reader, first)
            except (OSError, EOFError) as error:
                raise HttpError(f"{self.url} broke off its answer: {error}") from error
            except ValueError as error:  # a line beyond what a StreamReader takes
                raise HttpError(f"{self.url} gave no HTTP/1 answer: {error}") from error
            return response
        finally:
            # Also if the call was cancelled: the answer to it must not be taken for the next one's.
            if keep:
                self._idle.append((reader, writer))
            else:
                writer.close()


class _NoAnswer(Exception):
    """The connection ended before a byte of an answer."""

    def __init__(self, sent_whole: bool) -> None:
        super().__init__()
        self.sent_whole = sent_whole


def _is_sent(writer: asyncio.StreamWriter) -> Callable[[], bool]:
    """Return what tells whether all that was written has gone out, also when the connection ended,
    which empties the buffer."""
    if not writer.transport.get_write_buffer_size():
        return lambda: True
    writer.transport.set_write_buffer_limits(0)
    draining = asyncio.ensure_future(writer.drain())
    draining.add_done_callback(lambda task: task.cancelled() or task.exception())

    def sent() -> bool:
        if not draining.done():
            draining.cancel()
            return False
        return not draining.cancelled() and draining.exception() is None

    return sent


async def _read_response(reader: asyncio.StreamReader, first: bytes) -> tuple[Response, bool]:
    version, status, headers = await _read_head(reader, first)
    while 100 <= status < 200:
        if status == 101:
            raise ValueError("it switches protocols (101), which it was not asked for")
        version, status, headers = await _read_head(reader, await reader.readline())
    keep = version != b"HTTP/1.0" and headers.get("connection", "").lower() != "close"
    if status in (204, 304):
        body = b""
    elif headers.get("transfer-encoding", "").lower() == "chunked":
        body = await _read_chunks(reader)
    elif "content-length" in headers:
        body = await reader.readexactly(_length(headers["content-length"], 10))
    else:
        body, keep = await _read_to_end(reader), False
    return Response(status, headers, body), keep


async def _read_head(
    reader: asyncio.StreamReader, first: bytes
) -> tuple[bytes, int, dict[str, str]]:
    if not first:
        raise EOFError("it ended before the answer to the whole request")
    version, _, rest = first.strip().partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"it began {first[:80]!r}")
    headers: dict[str, str] = {}
    while (line := await reader.readline()) not in (b"\r\n", b"\n"):
        if not line:
            raise EOFError("it ended within the headers")
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return version, int(rest[:3]), headers


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := _length((await reader.readline()).split(b";")[0].decode("latin-1"), 16):
        _check_length(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readline()
    while (await reader.readline()).strip():
        pass
    return bytes(body)


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while some := await reader.read(1 << 16):
        body += some
        _check_length(len(body))
    return bytes(body)


def _length(text: str, base: int) -> int:
    try:
        length = int(text, base)
    except ValueError:
        raise ValueError(f"its length is {text[:40]!r}, which is no number") from None
    _check_length(length)
    return length


def _check_length(length: int) -> None:
    if not 0 <= length <= _MAX_BODY:
        raise ValueError(f"its body has {length} bytes; from 0 to {_MAX_BODY} are read")


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a ``Retry-After``, which is a number of them or a date; None if it is neither.

    More than a day is taken as a day: a server whose clock is wrong must not be lost for ever.
    """
    if value is None:
        return None
    with suppress(ValueError):
        return min(float(value), _LONGEST_S)
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return min((at - datetime.now(UTC)).total_seconds(), _LONGEST_S) if at.tzinfo else None


def _as_body(item: Any) -> bytes:
    if isinstance(item, (bytes, bytearray, memoryview)):
        return bytes(item)
    return item.encode() if isinstance(item, str) else json.dumps(item).encode()

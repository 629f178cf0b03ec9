"""A consumer behind HTTP: each record is a POST, and done when the response is 2xx."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from ackcore._error_hints import naming_arguments
from ackcore.calls import Reject, Unavailable
from ackcore.calls.threads import is_async, refuse_lazy
from ackcore.dispatch.dispatch_consumers import Target

#: Statuses of an outage: credentials that are refused, too many requests, and a server or a gateway
#: that is down. From 520 on they are not standard: proxies say why they did not reach the server,
#: and 529 is an overload.
_NOT_NOW = frozenset({401, 407, 429, 502, 503, 504, *range(521, 531)})
#: Client errors for which a retry may help: time-out, conflict, wrong connection, lock, too early;
#: and those that an endpoint returns for each record if it is down, has moved, has revoked a
#: permission, or was not paid.
_TRY_AGAIN = frozenset({402, 403, 404, 405, 408, 409, 410, 421, 423, 425})
_JSON = b"\r\nContent-Type: application/json"
_MAX_HEAD, _MAX_BODY = 1 << 20, 64 << 20
#: Seconds for a connection: less than the default time-out of a call, which counts as an attempt.
_CONNECT_S = 5.0
#: The least of these seconds that each address of a host has to accept a connection.
_ADDRESS_S = 1.0
#: The characters of a header's name (RFC 9110), and those that no header's value may have.
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
#: Control characters except the tab, and letters outside Latin-1.
_REFUSED = re.compile(r"[\x00-\x08\n-\x1f\x7f\u0100-\U0010ffff]")
#: A longer ``Retry-After`` counts as this: a server with a wrong clock is not excluded for ever.
_LONGEST_S = 86_400.0


class Response(NamedTuple):
    """A response. ``headers``: by lower-case name; the last one of each name."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpError(Exception):
    """An error status, a broken or invalid response, or no response to a request sent whole."""


class Http(Target):
    """An HTTP/1.1 endpoint.

    ======================  =============================================================
    2xx                     done
    429, 502 to 504         `Unavailable`, for the time in ``Retry-After``
    521 to 530              the same: a proxy did not reach the server, or it is overloaded (529)
    401, 407                `Unavailable`: the credentials are wrong or have expired
    402 to 405, 410         failed: probably the endpoint's fault, and not the record's
    3xx                     failed: redirects are not followed
    408, 409, 421, 423      failed
    425, 5xx                failed
    any other               `Reject`: no endpoint can take the record
    no connection in 5 s    `Unavailable`; with a shorter ``timeout_s``: timed out
    no or a broken answer   failed: the record may have crashed the server
    ======================  =============================================================

    Informational responses (1xx) are skipped. Connections are kept open, as many as there were
    calls at once. If a kept connection ends before a response begins, the request is sent once
    more, over a new one: most probably the server had closed it for being idle. If the server had
    begun with the record, it receives the record twice.

    Parameters
    ----------
    url : str
        ``http://`` or ``https://``. ``user:password@`` in it becomes a header ``Authorization``
        (Basic, UTF-8), and appears in no error.
    headers : mapping or callable, optional
        Headers of each request. They replace the default headers of the same name, in upper or
        lower case. A function without arguments that returns them is called for each request, for
        credentials that expire; if it raises, the call is `Unavailable`.
    encode : callable, optional
        Converts an item to the body, as bytes. By default bytes and str are sent unchanged, and
        everything else as JSON, with ``Content-Type: application/json``.
    decode : callable, optional
        Converts a `Response` to the result of `Target.call`. By default the result is None, which
        means success.
    ssl_context : ssl.SSLContext, optional
        The TLS settings for https; by default Python's.
    """

    @naming_arguments
    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        encode: Callable[[Any], bytes] | None = None,
        decode: Callable[[Response], Any] | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            shown = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
            raise ValueError(f"url must begin with http://host or https://host, got {shown!r}")
        place = parts.netloc.rpartition("@")[2]
        asked = f"{place}{parts.path}{parts.query}"
        if not asked.isascii() or not asked.isprintable() or " " in asked:
            # A server would refuse each request, and so each record.
            raise ValueError(
                "url must be ASCII without spaces, so percent-encode its path and query, and "
                f"encode its host by IDNA, got {parts._replace(netloc=place).geturl()!r}"
            )
        self.url = parts._replace(netloc=place).geturl()
        try:
            parts.hostname.encode("idna")  # as `getaddrinfo` does
        except UnicodeError:
            raise ValueError(
                "url must have a host whose parts between dots have 1 to 63 characters, got "
                f"{self.url!r}"
            ) from None
        secure = parts.scheme == "https"
        self._ssl = (ssl_context or ssl.create_default_context()) if secure else None
        self._host_of_tls = parts.hostname if secure else None
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        # Without it a server may choose any encoding.
        self._own = {"Host": place, "Accept-Encoding": "identity"}
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            coded = base64.b64encode(secret.encode()).decode()
            self._own["Authorization"] = f"Basic {coded}"
        self._line = f"POST {path} HTTP/1.1"
        self._names_json = encode is None
        refuse_lazy(headers, "headers")
        refuse_lazy(encode, "encode")
        if is_async(decode):  # one with ``yield`` may serve a caller of `call`
            raise TypeError(
                f"decode must be a plain function, got {decode!r} with 'async'; use a plain 'def'"
            )
        self._headers = headers if callable(headers) else None
        self._head = self._head_of({} if headers is None or callable(headers) else headers)
        self._encode = _as_body if encode is None else encode
        self._decode = decode
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._loop: asyncio.AbstractEventLoop | None = None  # of the idle connections

    async def call(self, item: Any) -> Any:
        """POST an item, and return the result of ``decode``, or None without it.

        Raises `Unavailable`, `Reject` or `HttpError`, as the table of the class says for the
        response; TypeError if ``encode`` returns no bytes; and an exception of ``encode`` or
        ``decode``.
        """
        body = self._encode(item)
        if not isinstance(body, (bytes, bytearray, memoryview)):
            # Other buffers are sent, too, but their length may count no bytes.
            raise TypeError(
                f"encode must return bytes, got {type(body).__name__}; encode a str by .encode(), "
                "and other values by json.dumps(...).encode()"
            )
        body = bytes(body)
        head = self._head if self._headers is None else self._new_head(self._headers)
        is_json = self._names_json and not isinstance(item, (bytes, bytearray, memoryview, str))
        names_json = is_json and b"\r\ncontent-type:" not in head.lower()
        response = await self._request(head, body, _JSON if names_json else b"")
        status = response.status
        if 200 <= status < 300:
            return None if self._decode is None else self._decode(response)
        said = f"{status} from {self.url}: {response.body[:200].decode('utf-8', 'replace')}"
        if status in _NOT_NOW:
            after_s = _retry_after_s(response.headers.get("retry-after"))
            raise Unavailable(said, after_s=after_s)
        if status in _TRY_AGAIN or status < 400 or status >= 500:
            raise HttpError(said)
        raise Reject(said)

    async def close(self) -> None:
        """Close the idle connections."""
        self._drop_foreign()
        while self._idle:
            self._idle.pop()[1].close()

    def _new_head(self, headers: Callable[[], Mapping[str, str]]) -> bytes:
        try:
            return self._head_of(headers())
        except Exception as error:
            raise Unavailable(f"headers() of {self.url} failed: {error!r}") from error

    def _head_of(self, given: Mapping[str, str]) -> bytes:
        """Return the request line and headers, without the last line end.

        Raises ValueError if a name is given twice, is Content-Length or Transfer-Encoding, or is no
        header's name. Also raises it if a value has control characters, or letters outside Latin-1.
        """
        replaced = {name.lower() for name in given}
        if len(replaced) < len(given) or replaced & {"content-length", "transfer-encoding"}:
            raise ValueError(
                "headers must have each name once, and neither Content-Length nor "
                f"Transfer-Encoding, which Http sets; got {', '.join(given)}"
            )
        sent = {name: value for name, value in self._own.items() if name.lower() not in replaced}
        fields = {name: f"{value}" for name, value in (sent | dict(given)).items()}
        for name, value in fields.items():
            # No error may show the value, which may be a secret; a UnicodeEncodeError would.
            if not _NAME.fullmatch(name) or _REFUSED.search(value):
                raise ValueError(
                    "headers must not hold line ends, other control characters or letters outside "
                    "Latin-1, and a name must consist of letters, digits and !#$%&'*+.^_`|~-; "
                    f"encode or remove the others in header {name!r}"
                )
        lines = [self._line, *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join(lines).encode("latin-1")

    def _drop_foreign(self) -> None:
        """Drop the idle connections of another event loop, which this one cannot read or close."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._idle.clear()
            self._loop = loop

    async def _request(self, head: bytes, body: bytes, header: bytes) -> Response:
        length = b"\r\nContent-Length: %d\r\n\r\n" % len(body)
        request = b"".join((head, header, length, body))
        self._drop_foreign()
        while self._idle:
            reader, writer = self._idle.pop()
            if writer.is_closing() or not _is_silent(reader):
                writer.close()
                continue
            try:
                return await self._exchange(reader, writer, request)
            except _NoAnswer:
                break
        try:
            reader, writer = await self._connected()
        except OSError as error:
            why = f"none within {_CONNECT_S:g} s" if isinstance(error, TimeoutError) else error
            raise Unavailable(f"no connection to {self.url}: {why}") from error
        try:
            return await self._exchange(reader, writer, request)
        except _NoAnswer as error:
            if error.sent_whole:
                raise HttpError(
                    f"{self.url} closed the connection without a response, after the whole request "
                    "was sent"
                ) from error
            raise Unavailable(
                f"{self.url} closed the connection without a response, before the whole request "
                "was sent"
            ) from error

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address of the host that can be reached.

        Each address has an equal part of the remaining time, but at least a second. So an address
        that never answers, such as an IPv6 address without a route, leaves time for the next one.
        The TLS handshake has the rest of the time. Raises TimeoutError if no address answers in
        time, otherwise an OSError with the errors of the addresses.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _CONNECT_S
        errors: list[OSError] = []
        async with asyncio.timeout_at(deadline):
            found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            for n, (family, kind, protocol, _, address) in enumerate(found):
                part_s = max(_ADDRESS_S, (deadline - loop.time()) / (len(found) - n))
                try:
                    connection = await _accepted(
                        socket.socket(family, kind, protocol), address, part_s
                    )
                    return await asyncio.open_connection(
                        sock=connection, ssl=self._ssl, server_hostname=self._host_of_tls
                    )
                except OSError as error:
                    errors.append(error)
        if all(isinstance(error, TimeoutError) for error in errors):
            raise TimeoutError
        raise OSError("; ".join(dict.fromkeys(map(str, errors))))

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
                raise HttpError(f"{self.url} sent an incomplete response: {error}") from error
            except ValueError as error:  # also a line beyond the limit of StreamReader
                raise HttpError(f"{self.url} sent no valid HTTP/1 response: {error}") from error
            return response
        finally:
            # Close it also after a cancelled call: its response must not answer the next request.
            # Close it also if another event loop has made calls meanwhile: it could not use it.
            if keep and asyncio.get_running_loop() is self._loop:
                self._idle.append((reader, writer))
            else:
                writer.close()


class _NoAnswer(Exception):
    """The connection ended before the first byte of a response."""

    def __init__(self, sent_whole: bool) -> None:
        super().__init__()
        self.sent_whole = sent_whole


def _is_silent(reader: asyncio.StreamReader) -> bool:
    """Return whether a kept connection is open, and nothing has come since its last response.

    A server may send a 408 before it closes an idle connection, or a body with a 204. These bytes
    must not answer the next request.
    """
    look = reader.read(1)
    try:
        look.send(None)
    except (StopIteration, OSError):
        return False
    look.close()
    return True


def _is_sent(writer: asyncio.StreamWriter) -> Callable[[], bool]:
    """Return a function that returns whether the system has all bytes that were written so far."""
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


async def _accepted(made: socket.socket, address: Any, timeout_s: float) -> socket.socket:
    """Connect a new socket to an address, and return it. Close it on an error, such as OSError."""
    try:
        made.setblocking(False)
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(made, address)
    except BaseException as error:
        made.close()
        if isinstance(error, TimeoutError):
            raise TimeoutError(f"no answer from {address[0]}") from error
        raise
    return made


async def _read_response(reader: asyncio.StreamReader, first: bytes) -> tuple[Response, bool]:
    version, status, headers = await _read_head(reader, first)
    while 100 <= status < 200:
        if status == 101:
            raise ValueError("status 101 switches protocols, which was not requested")
        version, status, headers = await _read_head(reader, await reader.readline())
    keep = version != b"HTTP/1.0" and headers.get("connection", "").lower() != "close"
    coding = headers.get("transfer-encoding", "identity").lower()
    if status in (204, 304):
        body = b""
    elif coding == "chunked":
        body = await _read_chunks(reader)
    elif coding != "identity":
        raise ValueError(f"the response's Transfer-Encoding is {coding[:40]!r}, not 'chunked'")
    elif "content-length" in headers:
        body = await reader.readexactly(_length(headers["content-length"], 10))
    else:
        body, keep = await _read_to_end(reader), False
    return Response(status, headers, body), keep


async def _read_head(
    reader: asyncio.StreamReader, first: bytes
) -> tuple[bytes, int, dict[str, str]]:
    if not first:
        raise EOFError("the connection ended after an informational response (1xx)")
    version, _, rest = first.strip().partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"the response begins with {first[:80]!r}, which is no status line")
    headers: dict[str, str] = {}
    size = 0
    while (line := await reader.readline()) not in (b"\r\n", b"\n"):
        if not line:
            raise EOFError("the connection ended within the headers")
        size += len(line)
        if size > _MAX_HEAD:
            raise ValueError(f"the response's headers have more than {_MAX_HEAD} bytes")
        name, _, value = line.decode("latin-1").partition(":")
        name, value = name.strip().lower(), value.strip()
        if name in ("content-length", "transfer-encoding") and headers.get(name, value) != value:
            raise ValueError(
                f"the response has two headers {name}, {headers[name][:40]!r} and {value[:40]!r}"
            )
        headers[name] = value
    return version, int(rest[:3]), headers


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while line := await reader.readline():
        size = _length(line.split(b";")[0].decode("latin-1"), 16)
        if not size:
            while (await reader.readline()).strip():
                pass
            return bytes(body)
        _check_length(len(body) + size)
        body += await reader.readexactly(size)
        await reader.readline()
    raise EOFError("the connection ended within the body")


async def _read_to_end(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while some := await reader.read(1 << 16):
        body += some
        _check_length(len(body))
    return bytes(body)


def _length(text: str, base: int) -> int:
    # int() also accepts signs, underscores and 0x.
    if not re.fullmatch("[0-9]{1,20}" if base == 10 else "[0-9a-fA-F]{1,20}", text.strip()):
        raise ValueError(f"the length {text[:40]!r} of the response's body is not a number")
    length = int(text, base)
    _check_length(length)
    return length


def _check_length(length: int) -> None:
    if not 0 <= length <= _MAX_BODY:
        raise ValueError(f"the response's body must have 0..{_MAX_BODY} bytes, got {length}")


def _retry_after_s(value: str | None) -> float | None:
    """Return the seconds in a ``Retry-After``, a number or a date; None if it is neither.

    They are at most a day, and may be below 0.
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

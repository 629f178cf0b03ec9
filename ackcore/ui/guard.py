"""Access control of the page: only requests from this server's own pages and host names.

Every page in a browser can send requests to a server on localhost and, through a name that is later
resolved to 127.0.0.1 (DNS rebinding), read the answers. Therefore the Host header must be one of
the known names, and requests that change something must come from our own page, with a token. An
address in the Host header cannot be rebound, so a server that listens at all addresses accepts any.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Nothing but our own files, and none of them in a frame of another page.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Refuses requests that do not come from our own pages, and sends isolating headers.

    Parameters
    ----------
    app : ASGI application
        The protected application.
    hosts : collection of str
        The server's host names, without the port; IPv6 addresses in brackets.
    any_address : bool, default False
        Whether any address is accepted as well.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], any_address: bool = False):
        self._app = app
        self._any_address = any_address
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        wrong = self._problem(scope["method"], Headers(scope=scope))
        if wrong is None:
            await self._app(scope, receive, guarded)
        else:
            await JSONResponse({"error": wrong}, 403)(scope, receive, guarded)

    def _problem(self, method: str, headers: Headers) -> str | None:
        host = headers.get("host", "")
        name = _name_of(host)
        if name not in self._hosts and not (self._any_address and _is_address(name)):
            return "this server is not known under the name that was asked for"
        if method in ("GET", "HEAD"):
            return None
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return "the request comes from a page of another server"
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "the request comes from a page of another server"
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return "the request must be application/json"
        return None


def _name_of(host: str) -> str:
    """Return a Host header without its port."""
    name, colon, port = host.rpartition(":")
    return (name if colon and port.isdigit() else host).lower()


def _is_address(name: str) -> bool:
    bracketed = name.startswith("[") and name.endswith("]")
    try:
        # Of IPv6 it is in brackets, and of IPv4 it is not.
        return (ip_address(name[1:-1] if bracketed else name).version == 6) == bracketed
    except ValueError:
        return False


def check_token(token: object) -> None:
    """Refuse an empty token.

    Raises
    ------
    TypeError, ValueError
        If it is neither None nor a text, or an empty one.
    """
    if token is None:
        return
    if not isinstance(token, str):
        raise TypeError(f"token must be a str or None, got {type(token).__name__}")
    if not token.strip():
        raise ValueError(
            f"token must not be empty, got {token!r}, with which anybody could send dead letters "
            "again; name a secret one, or None, and nobody may"
        )


def token_is(given: Any, token: str) -> bool:
    """Whether a token is right, compared in constant time."""
    text = given if isinstance(given, str) else ""
    return hmac.compare_digest(text.encode("utf-8", "replace"), token.encode())

"""The connection to brokers: librdkafka's settings, without those that ackcore sets."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from logging import DEBUG, INFO, WARNING, Logger, LoggerAdapter
from typing import TYPE_CHECKING, Any

from ackcore._error_hints import REDACTED, counted, without_secrets

if TYPE_CHECKING:
    _Adapter = LoggerAdapter[Logger]
else:
    _Adapter = LoggerAdapter

_log = logging.getLogger(__name__)

#: Settings that ackcore's guarantees fix, with the reason or the alternative.
_OURS = {
    "bootstrap.servers": "it is the argument bootstrap_servers",
    "metadata.broker.list": "it is the argument bootstrap_servers",
    "group.id": "it is the argument group_id",
    "enable.auto.commit": "offsets are committed when their records are done",
    "enable.auto.offset.store": "offsets are committed when their records are done",
    "auto.offset.reset": "use start, and for lost offsets out_of_range or a spout's lost",
    "enable.partition.eof": "ackcore sets it to find the end of a range",
    "test.mock.num.brokers": "brokers are at bootstrap_servers",
}
#: Settings of a consumer that reads partitions and joins no group.
READER: dict[str, Any] = {
    # confluent-kafka requires a group.  Without subscriptions and commits, it is never sent.
    "group.id": "ackcore",
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
}
#: Security settings that may be shown.  All other security settings count as secrets.
_SHOWN = {
    "sasl.mechanism",
    "sasl.mechanisms",
    "sasl.kerberos.service.name",
    "sasl.oauthbearer.method",
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.cipher.suites",
    "ssl.endpoint.identification.algorithm",
}
_SECURITY = ("sasl.", "ssl.")
_SECRET_WORDS = ("password", "secret", "token", "credential", "jaas", "private", "passphrase")
#: The beginnings of settings for consumers only: other clients warn about them.
_OF_CONSUMERS = (
    *("group.", "session.", "heartbeat.", "max.poll.", "max.partition.fetch.", "fetch."),
    *("queued.", "auto.", "enable.auto.", "enable.partition.", "partition.assignment."),
    *("isolation.", "check.crcs", "coordinator.", "consume.", "offset."),
)

#: The parts in which otherwise equal log lines differ.
_VARIES = re.compile(r"after \d+ms |, \d+ identical error\(s\) suppressed")
#: Equal lines are logged once in this many seconds; at most so many lines are compared.
_EQUAL_S, _MOST_LINES = 60.0, 1000

#: The latest expiry of a token, in seconds since 1970: after the year 9999, the last of `datetime`.
#: Read as milliseconds it is a time in 2001, so each expiry in milliseconds exceeds it.
_LATEST_S = 1e12

#: The types of loggers.
Log = Logger | _Adapter
Value = str | int | float | bool | Callable[..., Any] | Log


class ClientSettings:
    """The addresses of brokers, and librdkafka's settings of the connection.

    Neither its ``repr`` nor its errors show a secret.

    ``bootstrap_servers``: ``host:port`` of brokers, separated by commas. ``options``: librdkafka
    settings: ``security.protocol``, ``sasl.*``, ``ssl.*``, ``oauth_cb``, ``isolation.level``,
    ``fetch.*`` and all others except those that decide which offsets are committed and read, which
    ackcore sets.

    Raises TypeError if an argument has another type. Raises ValueError if ``bootstrap_servers`` is
    empty, or ackcore sets an option itself; it names the alternative.
    """

    def __init__(self, bootstrap_servers: str, options: Mapping[str, Value] | None = None) -> None:
        self.bootstrap_servers = _servers(bootstrap_servers)
        self.options = _checked(options)

    def client_config(
        self, own: Mapping[str, Value], defaults: Mapping[str, Value] | None = None
    ) -> dict[str, Any]:
        """Return the configuration for a client of confluent-kafka.

        ``own``: settings that override the user's options. ``defaults``: settings that the user's
        options override. The user's ``oauth_cb`` is wrapped in `Tokens`.
        """
        where = {"bootstrap.servers": self.bootstrap_servers}
        found = {**where, **(defaults or {}), **self.options, **own}
        given = self.options.get("oauth_cb")
        return {**found, "oauth_cb": Tokens(given, self)} if callable(given) else found

    def redacted(self, text: str) -> str:
        """Return a text with "[redacted]" in place of the value of each secret option."""
        return without_secrets(text, self._secrets())

    def logger(self, logger: Logger) -> ClientLog:
        """Return a logger that passes messages on to ``logger``, without secrets."""
        return ClientLog(logger, self)

    def client_logger(self, logger: Logger) -> ClientLog:
        """Return a `ClientLog` for the user's option ``logger``, or without one for ``logger``."""
        own: Any = self.options.get("logger", logger)
        return ClientLog(own, self)

    def _secrets(self) -> set[str]:
        # Most numbers are times and sizes.  They would be removed from any text with these digits.
        return {
            str(value)
            for name, value in self.options.items()
            if (isinstance(value, str) and _is_secret(name))
            or (type(value) in (int, float) and _names_secret(name))
        }

    def __repr__(self) -> str:
        shown = {
            name: REDACTED if _is_secret(name) else _shown(value)
            for name, value in self.options.items()
        }
        return f"ClientSettings({self.bootstrap_servers!r}, {shown})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClientSettings):
            return NotImplemented
        return (self.bootstrap_servers, self.options) == (other.bootstrap_servers, other.options)

    __hash__ = None  # type: ignore[assignment]


def without_consumers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a client's configuration without the settings that are for consumers only."""
    return {name: of for name, of in config.items() if not name.startswith(_OF_CONSUMERS)}


class Tokens:
    """The user's ``oauth_cb``, with a check of its result and a warning for each failure.

    Attributes: ``failure``: why there is no token, also while a call runs; None before the first
    call, and after a call that gave one.
    """

    def __init__(self, given: Callable[..., Any], settings: ClientSettings) -> None:
        self._given = given
        self._settings = settings
        self.failure: str | None = None

    def __call__(self, config: str) -> Any:
        """Return the user's tuple: a token, its expiry in seconds since 1970, and maybe more.

        Raises the user's exception, TypeError if the result is no token, and ValueError if its
        expiry has passed or is in milliseconds. Stores and logs each of them as ``failure``.
        """
        self.failure = "it has not returned yet"
        try:
            found = self._given(config)
            _check_token(found)
        except BaseException as error:
            self.failure = self._settings.redacted(f"{type(error).__name__}: {error}")
            _log.warning("oauth_cb gave no token, and is called again in 10 s: %s", self.failure)
            raise
        self.failure = None
        return found


class ClientLog(_Adapter):
    """A logger that removes the secrets of settings from messages, and logs equal ones once.

    Librdkafka repeats an error several times a second, and a consumer that is refused a commit
    tries again each second. A warning or an error keeps its level. Equal ones in the minute after
    it are logged at DEBUG, and the next one after that minute gives their number.
    """

    def __init__(self, logger: Logger, settings: ClientSettings) -> None:
        super().__init__(logger)
        self._settings = settings
        #: By line, the time of the last one with its level, and the number of equal ones since.
        self._lines: dict[str, tuple[float, int]] = {}

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Format a message, remove secrets, log it; a warning that ends in ": retrying" as INFO."""
        text = str(msg) % args if args else str(msg)
        if level == WARNING and text.endswith(": retrying"):
            level = INFO  # at its start a client normally waits for a coordinator that loads
        elif level >= WARNING:
            line, now = _VARIES.sub("", text), time.monotonic()
            last, equal = self._lines.get(line, (-math.inf, 0))
            if now - last < _EQUAL_S:
                self._lines[line] = last, equal + 1
                level = DEBUG
            else:
                if len(self._lines) >= _MOST_LINES:
                    self._lines.clear()
                self._lines[line] = now, 0
                if equal:
                    text += f" ({counted(equal, 'equal line')} in the last {now - last:.0f} s)"
        if self.isEnabledFor(level):
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            self.logger.log(level, "%s", self._settings.redacted(text), **kwargs)


def _servers(servers: Any) -> str:
    if not isinstance(servers, str):
        raise TypeError(
            "bootstrap_servers must be a string of host:port, with commas between several, got "
            f"{type(servers).__name__}"
        )
    if not servers.strip():
        raise ValueError("bootstrap_servers must not be empty; 'localhost:9092' is one broker")
    return servers


def _checked(options: Any) -> dict[str, Value]:
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(
            "options must be a mapping of librdkafka's settings, got "
            f"{type(options).__name__}; {{'security.protocol': 'SSL'}} is one"
        )
    for name, value in options.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of options must be strings, got {name!r}")
        if name in _OURS:
            raise ValueError(f"options must not have {name!r}: {_OURS[name]}")
        if not isinstance(value, (str, int, float, Logger, LoggerAdapter)) and not callable(value):
            # The value itself may be a secret, in bytes.
            raise TypeError(
                f"options[{name!r}] must be a string, a number, a bool or a callable, got "
                f"{type(value).__name__}"
            )
    return dict(options)


def _check_token(found: Any) -> None:
    """Raise TypeError unless a result of ``oauth_cb`` is a tuple of a token and an expiry.

    Raises ValueError unless the expiry is in the future, in seconds.
    """
    if not (
        isinstance(found, tuple)
        and len(found) >= 2
        and isinstance(found[0], str)
        and isinstance(found[1], (int, float))
    ):
        # The result itself is a secret.
        kind = type(found).__name__
        if isinstance(found, tuple):
            kind = f"a tuple of {', '.join(type(each).__name__ for each in found)}"
        raise TypeError(
            "oauth_cb must return a tuple (token, expiry), a string and seconds since 1970, got "
            f"{kind}"
        )
    if not found[1] <= _LATEST_S:
        # librdkafka would request no other token when this one has expired.
        raise ValueError(
            "oauth_cb must return an expiry in seconds since 1970, a finite number up to "
            f"{_LATEST_S:.0f}, got {found[1]}; divide milliseconds by 1000"
        )
    left = found[1] - time.time()
    if left <= 0:
        raise ValueError(
            f"oauth_cb must return an expiry in the future, in seconds since 1970, got {found[1]}, "
            f"which is {-left:.0f} s ago"
        )


def _is_secret(name: str) -> bool:
    if name.startswith(_SECURITY):
        return name not in _SHOWN
    return _names_secret(name)


def _names_secret(name: str) -> bool:
    return any(word in name for word in _SECRET_WORDS)


def _shown(value: Value) -> Value:
    # A callable object may have secrets in its own repr.
    return f"a {type(value).__name__}" if callable(value) else value

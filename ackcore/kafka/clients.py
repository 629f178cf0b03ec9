"""New clients of confluent-kafka."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from ackcore.kafka.client_settings import Tokens
from ackcore.kafka.kafka_errors import NoToken

_Client = TypeVar("_Client")


def new_client(make: Callable[[dict[str, Any]], _Client], config: dict[str, Any]) -> _Client:
    """Return ``make(config)``, a client.

    Raises NoToken if the user's ``oauth_cb`` gives no token within 10 s. Raises KafkaException if
    librdkafka refuses the settings.

    ``make``: a class of confluent-kafka. ``config``: from `ClientSettings.client_config`.
    """
    try:
        return make(config)
    # confluent-kafka 2.16 sets an exception, and then calls ``error_cb``, which fails.
    except (KafkaException, SystemError):
        tokens = config.get("oauth_cb")
        if not isinstance(tokens, Tokens) or tokens.failure is None:
            raise
        text = f"oauth_cb gave no token within 10 s: {tokens.failure}"
        raise NoToken(KafkaError(KafkaError._AUTHENTICATION, text)) from None

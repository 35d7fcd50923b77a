"""Exchanges of elastic averaging: rates, and how an exchange commits."""

from ganglion.decide.schedules.exchanges.elastic_rates import ElasticRate
from ganglion.decide.schedules.exchanges.served import (
    EXCHANGE,
    FIRST_COME,
    JOIN,
    LEAVE,
    LOOK,
    PULL,
    PUSH,
    RETURN,
    STALENESS_PER_WORKER,
    WRITES,
    Event,
    Refuse,
    Repeat,
    Request,
    Serve,
    ServedCenter,
)
from ganglion.decide.schedules.exchanges.sync import Exchange, SyncExchange

__all__ = [
    "EXCHANGE",
    "FIRST_COME",
    "JOIN",
    "LEAVE",
    "LOOK",
    "PULL",
    "PUSH",
    "RETURN",
    "STALENESS_PER_WORKER",
    "WRITES",
    "ElasticRate",
    "Event",
    "Exchange",
    "Refuse",
    "Repeat",
    "Request",
    "Serve",
    "ServedCenter",
    "SyncExchange",
]

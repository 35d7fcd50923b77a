"""Exchanges of elastic averaging: their rates, when they start, in which order, how they commit.

Pure state machines: no weights, no clock, no messages.
"""

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
    OrderEntry,
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
    "Exchange",
    "OrderEntry",
    "Refuse",
    "Repeat",
    "Request",
    "Serve",
    "ServedCenter",
    "SyncExchange",
]

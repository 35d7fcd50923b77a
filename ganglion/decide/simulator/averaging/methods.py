"""The methods of the paper (You, Buluc, Demmel 2017) by how they exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

ORDERED, SERVED, TOGETHER = "ordered", "served", "together"


@dataclass(frozen=True, slots=True, kw_only=True)
class AveragingMethod:
    """How a method exchanges; `order` is ORDERED, SERVED or TOGETHER."""

    order: str
    is_elastic: bool = True
    has_momentum: bool = False
    has_lock: bool = True
    overlaps: bool = False
    is_packed: bool = True
    center_on_host: bool = True


METHODS: Mapping[str, AveragingMethod] = {
    "original_easgd_no_overlap": AveragingMethod(order=ORDERED, is_packed=False),
    "original_easgd": AveragingMethod(order=ORDERED, is_packed=False, overlaps=True),
    "async_sgd": AveragingMethod(order=SERVED, is_elastic=False),
    "async_msgd": AveragingMethod(order=SERVED, is_elastic=False, has_momentum=True),
    "hogwild_sgd": AveragingMethod(order=SERVED, is_elastic=False, has_lock=False),
    "async_easgd": AveragingMethod(order=SERVED, overlaps=True),
    "async_measgd": AveragingMethod(order=SERVED, overlaps=True, has_momentum=True),
    "hogwild_easgd": AveragingMethod(order=SERVED, overlaps=True, has_lock=False),
    "sync_sgd": AveragingMethod(order=TOGETHER, is_elastic=False, center_on_host=False),
    "sync_easgd_1": AveragingMethod(order=TOGETHER),
    "sync_easgd_2": AveragingMethod(order=TOGETHER, center_on_host=False),
    "sync_easgd_3": AveragingMethod(order=TOGETHER, center_on_host=False, overlaps=True),
    "sync_measgd_3": AveragingMethod(
        order=TOGETHER, center_on_host=False, overlaps=True, has_momentum=True
    ),
}
"""The methods of the paper by name, and Sync EASGD 3 with the momentum of Async MEASGD.

Only the original sends layer by layer.
"""

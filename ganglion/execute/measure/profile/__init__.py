"""Micro-benchmarks of this machine: products, messages, collectives, tiers.

Every rank measures at the same time as all others, as it will compute. What comes out are times
with the amounts that the cost model needs to explain them; the fit is in `decide/costs`.
"""

from ganglion.execute.measure.profile.links import Pairs, overlap_share, time_messages, time_rings
from ganglion.execute.measure.profile.products import ProductTime, time_products
from ganglion.execute.measure.profile.sizes import ModelCase, ProfileSizes, profile_sizes
from ganglion.execute.measure.profile.tiers import TierRates, time_tiers
from ganglion.execute.measure.profile.timing import Mark, Taken, Watch, since, undisturbed

__all__ = [
    "Mark",
    "ModelCase",
    "Pairs",
    "ProductTime",
    "ProfileSizes",
    "Taken",
    "TierRates",
    "Watch",
    "overlap_share",
    "profile_sizes",
    "since",
    "time_messages",
    "time_products",
    "time_rings",
    "time_tiers",
    "undisturbed",
]

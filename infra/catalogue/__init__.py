"""Facts about instance types, images, quotas and prices: data files with date and source, and their readers."""

from infra.catalogue.interfaces import Interface, efa_layout
from infra.catalogue.prices import Prices, load_prices
from infra.catalogue.types import InstanceType, NetworkCard, instance_type, instance_types

__all__ = [
    "InstanceType",
    "Interface",
    "NetworkCard",
    "Prices",
    "efa_layout",
    "instance_type",
    "instance_types",
    "load_prices",
]

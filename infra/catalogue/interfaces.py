"""The network interfaces of an instance, derived from what its cards can do.

The layout is the one that AWS recommends now: the primary interface is plain ENA at card 0, device 0; every card
that can do EFA gets an `efa-only` interface, which takes no IP address (card 0 at device 1, the others at device 0).
A card 0 with room for one interface only, or a wish for a public address, falls back to one `efa` interface there.
Source: AWS EC2 guide, "Maximize network bandwidth on Amazon EC2 instances with multiple network cards" and
"EFA and accelerated instance types"; limits from DescribeInstanceTypes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from infra.catalogue.types import InstanceType, NetworkCard

InterfaceKind = Literal["interface", "efa", "efa-only"]
EFA_KINDS = ("efa", "efa-only")


@dataclass(frozen=True)
class Interface:
    """One interface of a launch template: card index, device index on that card, interface type."""

    card: int
    device: int
    kind: InterfaceKind


def _extra_kind(card: NetworkCard) -> InterfaceKind | None:
    if "efa-only" in card.interface_types:
        return "efa-only"
    return "efa" if "efa" in card.interface_types else None


def efa_layout(item: InstanceType, *, efa: bool = True, single: bool = False) -> tuple[Interface, ...]:
    """Every interface that an instance of this type starts with, primary first.

    `efa=False` gives the plain primary alone. `single=True` keeps it to one interface (needed for a public
    address): `efa` on card 0 where that card can do it.
    """
    first = item.cards[0]
    plain = Interface(0, 0, "interface")
    if not efa or item.efa_max == 0:
        return (plain,)
    combined = Interface(0, 0, "efa") if "efa" in first.interface_types else plain
    if single:
        return (combined,)
    left = item.efa_max
    layout: list[Interface] = []
    first_kind = _extra_kind(first)
    if first_kind is None:
        layout.append(plain)
    elif first.max_interfaces >= 2:
        layout += [plain, Interface(0, 1, first_kind)]
        left -= 1
    else:
        layout.append(combined)
        left -= 1
    for card in item.cards[1:]:
        kind = _extra_kind(card)
        if left > 0 and kind is not None and len(layout) < item.max_interfaces:
            layout.append(Interface(card.index, 0, kind))
            left -= 1
    return tuple(layout)


def efa_count(layout: tuple[Interface, ...]) -> int:
    """How many EFA devices the operating system will see."""
    return sum(interface.kind in EFA_KINDS for interface in layout)


def private_addresses(layout: tuple[Interface, ...]) -> int:
    """How many private IP addresses the layout takes from the subnet (`efa-only` takes none)."""
    return sum(interface.kind != "efa-only" for interface in layout)

"""The test engine itself: wire values, decisions, launch rules. A tool that proves things must be provable."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pulumi")
pytest.importorskip("moto")

from tests.infra_engine.launch_rules import LaunchRefused, check_interfaces, check_template
from tests.infra_engine.state import Record, decide, with_ignored
from tests.infra_engine.wire import UNKNOWN, Secret, decode, encode, has_unknown, redact, reveal

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abcdef", min_size=1), PLAIN, max_size=4))
def test_values_survive_the_wire(values):
    assert decode(encode(values)) == values


@given(st.text(min_size=1))
def test_a_secret_is_marked_on_the_wire_and_hidden_in_print(text):
    values = decode(encode({"plain": 1, "deep": [{"password": Secret(text)}]}))
    assert values["deep"][0]["password"] == Secret(text)
    assert redact(values) == {"plain": 1, "deep": [{"password": "[secret]"}]}
    assert reveal(values)["deep"][0]["password"] == text
    assert repr(Secret("tiger-in-the-tank")) == "[secret]"


def test_unknowns_travel():
    values = decode(encode({"id": UNKNOWN, "name": "x"}))
    assert values["id"] is UNKNOWN and has_unknown(values) and not has_unknown({"name": "x"})


def record(type_token, inputs):
    return Record("urn", type_token, "n", True, inputs, inputs, "id", "", False, False, (), ())


INSTANCE = "aws:ec2/instance:Instance"


def test_decisions():
    old = record(INSTANCE, {"ami": "a", "tags": {"x": "1"}})
    assert decide(INSTANCE, {"ami": "a"}, None) == ("create", ())
    assert decide(INSTANCE, dict(old.inputs), old) == ("same", ())
    assert decide(INSTANCE, {"ami": "a", "tags": {"x": "2"}}, old) == ("update", ("tags",))
    assert decide(INSTANCE, {"ami": "b", "tags": {"x": "1"}}, old) == ("replace", ("ami",))
    assert decide(INSTANCE, {"ami": "a"}, old) == ("update", ("tags",))


def test_ignored_properties_keep_their_old_value():
    old = record(INSTANCE, {"ami": "a"})
    assert with_ignored({"ami": "b"}, old, ("ami",)) == {"ami": "a"}
    assert with_ignored({"ami": "b", "new": 1}, old, ("new",)) == {"ami": "b"}
    assert with_ignored({"ami": "b"}, None, ("ami",)) == {"ami": "b"}


def card(index, kinds=("interface", "efa", "efa-only"), limit=2):
    return {"NetworkCardIndex": index, "InterfaceTypes": list(kinds), "MaximumNetworkInterfaces": limit}


NETWORK = {
    "NetworkCards": [card(0), card(1)],
    "MaximumNetworkInterfaces": 4,
    "EfaInfo": {"MaximumEfaInterfaces": 2},
}


def interface(card_index, device, kind, **more):
    return {"NetworkCardIndex": card_index, "DeviceIndex": device, "InterfaceType": kind, **more}


GOOD = [interface(0, 0, "interface"), interface(0, 1, "efa-only"), interface(1, 0, "efa-only")]


def test_the_present_layout_passes():
    check_interfaces(GOOD, NETWORK)


REFUSED = [
    ([interface(0, 0, "efa-only")], NETWORK, "primary"),
    ([interface(1, 0, "interface")], NETWORK, "primary"),
    ([*GOOD, interface(1, 0, "interface")], NETWORK, "one place"),
    ([*GOOD, interface(1, 2, "interface")], NETWORK, "device index 2"),
    ([*GOOD, interface(2, 0, "interface")], NETWORK, "no network card 2"),
    ([*GOOD, interface(1, 1, "efa-only")], NETWORK, "EFA by card"),
    (GOOD, {**NETWORK, "EfaInfo": {"MaximumEfaInterfaces": 1}}, "at most 1"),
    (GOOD, {**NETWORK, "MaximumNetworkInterfaces": 2}, "at most 2"),
    (GOOD, {**NETWORK, "NetworkCards": [card(0, ("interface",)), card(1)]}, "cannot do efa-only"),
    ([interface(0, 0, "interface", AssociatePublicIpAddress=True), GOOD[1]], NETWORK, "public address"),
]


@pytest.mark.parametrize(("interfaces", "network", "message"), REFUSED)
def test_wrong_layouts_are_refused(interfaces, network, message):
    with pytest.raises(LaunchRefused, match=message):
        check_interfaces(interfaces, network)


TARGET = {"CapacityReservationTarget": {"CapacityReservationId": "cr-1"}}


@pytest.mark.parametrize(
    "data",
    [
        {"NetworkInterfaces": GOOD, "SecurityGroupIds": ["sg-1"]},
        {"InstanceMarketOptions": {"MarketType": "capacity-block"}},
        {
            "InstanceMarketOptions": {"MarketType": "capacity-block"},
            "CapacityReservationSpecification": TARGET,
            "Placement": {"GroupName": "g"},
        },
        {"InstanceMarketOptions": {"MarketType": "spot"}, "CapacityReservationSpecification": TARGET},
    ],
)
def test_wrong_templates_are_refused(data):
    with pytest.raises(LaunchRefused):
        check_template(data)

"""Ranks on several machines listen where the others can reach them."""

from __future__ import annotations

import os
import socket

import pytest

from pipeline.distributed import network
from pipeline.distributed.network import find_interface, set_interface
from shards.base.errors import UserError

MACHINE = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.0.0.5", "fe80::1%eth0"],
    "ib0": ["10.1.0.5"],
    "docker0": ["172.17.0.1"],
}


@pytest.mark.parametrize(
    ("own", "chosen"),
    [
        (["10.1.0.5", "10.0.0.5"], "ib0"),  # the way to the first machine comes before the default route
        (["127.0.1.1", "10.0.0.5"], "eth0"),  # this is the first machine, and its name leads to itself
        ([None, "10.0.0.5"], "eth0"),  # the name of the first machine does not resolve here
        (["127.0.0.1", None], None),  # three are left, and nothing says which
        (["fe80::1%eth0", None], None),
    ],
)
def test_the_interface_is_the_one_that_leads_to_the_others(own: list[str | None], chosen: str | None) -> None:
    assert find_interface(own, MACHINE) == chosen


def test_the_only_interface_is_taken_without_any_route() -> None:
    assert find_interface([None, None], {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"], "eth1": []}) == "eth0"
    assert find_interface([None, None], {"lo": ["127.0.0.1"]}) is None


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine whose name resolves to loopback, and whose other addresses are MACHINE's."""
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    monkeypatch.setattr(network, "_addresses", lambda: MACHINE)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    return monkeypatch


def test_a_name_that_leads_nowhere_is_replaced_only_between_machines(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(network, "_own_address_towards", lambda host: "10.0.0.5" if host == network.ANYWHERE else None)
    set_interface(8, 8)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    set_interface(16, 8)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=eth0"


def test_what_the_user_set_and_names_that_work_are_left_alone(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(network, "_listening_address", lambda: "10.0.0.5")
    set_interface(16, 8)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    environment.undo()
    environment.setenv("GLOO_SOCKET_IFNAME", "ib0")
    set_interface(16, 8)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"


def test_without_a_way_the_refusal_says_what_to_set(environment: pytest.MonkeyPatch) -> None:
    environment.setattr(network, "_own_address_towards", lambda host: None)
    with pytest.raises(UserError, match=r"localhost resolves to (127\.|::1).*nowhere\.invalid.*Set GLOO_SOCKET_IFNAME"):
        set_interface(16, 8)


def test_this_machine_is_described_as_it_is() -> None:
    assert network._own_address_towards("127.0.0.1") == "127.0.0.1"
    assert network._own_address_towards("nowhere.invalid") is None
    assert any("127.0.0.1" in addresses for addresses in network._addresses().values())

"""The network interface of a rank whose host name does not lead other machines to it.

Gloo listens on the first address its own host name resolves to. On many machines that is 127.0.0.1 or 127.0.1.1, and
ranks of other machines would wait for it in vain.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Iterable, Mapping

import psutil

from shards.base.errors import UserError

log = logging.getLogger(__name__)
ANYWHERE = "192.0.2.1"  # reserved for documentation: it leads to the default route, and nothing is sent


def set_interface(size: int, local_size: int) -> None:
    """Set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME if there are several machines and this one's name is of no use."""
    master = os.environ.get("MASTER_ADDR", "")
    on_one_machine = size <= local_size or master == "localhost" or master.startswith("127.")
    if on_one_machine or "GLOO_SOCKET_IFNAME" in os.environ or not _is_local_only(_listening_address()):
        return
    name = find_interface([_own_address_towards(master), _own_address_towards(ANYWHERE)], _addresses())
    if name is None:
        raise UserError(
            f"Ranks of other machines cannot reach this one: its host name {socket.gethostname()} resolves to "
            f"{_listening_address() or 'nothing'}, and no network interface leads to {master or 'MASTER_ADDR'}. Set "
            "GLOO_SOCKET_IFNAME to the interface between the machines (`ip address` lists them), or correct /etc/hosts."
        )
    os.environ["GLOO_SOCKET_IFNAME"] = name
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # without = it is a prefix
    log.info("host name %s resolves to %s: ranks are connected by %s instead (GLOO_SOCKET_IFNAME)",
             socket.gethostname(), _listening_address() or "nothing", name)  # fmt: skip


def find_interface(own: Iterable[str | None], interfaces: Mapping[str, Iterable[str]]) -> str | None:
    """The interface with the first of these addresses that others can reach; else the only one they can reach, if it is one.

    own: addresses from which packets would leave, best first; interfaces: addresses by name.
    """
    reachable = {name: [a for a in found if not _is_local_only(a)] for name, found in interfaces.items()}
    for address in own:
        for name, addresses in reachable.items():
            if address in addresses:
                return name
    left = [name for name, addresses in reachable.items() if addresses]
    return left[0] if len(left) == 1 else None


def _listening_address() -> str | None:
    """The address gloo would listen on: the first of the host name that is one of this machine."""
    for family, address in _resolve(socket.gethostname()):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, 0))
                return address
            except OSError:
                continue
    return None


def _own_address_towards(host: str) -> str | None:
    """The address from which a packet to `host` would leave. Connecting a datagram socket sends nothing."""
    for family, address in _resolve(host):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((address, 9))
                return str(probe.getsockname()[0])
            except OSError:
                continue
    return None


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        return [
            (family, str(address[0]))
            for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
        ]
    except OSError:
        return []


def _addresses() -> dict[str, list[str]]:
    """Addresses of the interfaces that are up."""
    up = psutil.net_if_stats()
    return {
        name: [item.address for item in items if item.family in (socket.AF_INET, socket.AF_INET6)]
        for name, items in psutil.net_if_addrs().items()
        if name in up and up[name].isup
    }


def _is_local_only(address: str | None) -> bool:
    """Also true of an address that other machines cannot use: none at all, or one that is valid on its own link only."""
    if address is None:
        return True
    number = ipaddress.ip_address(address.partition("%")[0])
    return number.is_loopback or number.is_link_local or number.is_unspecified

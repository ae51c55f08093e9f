"""The one address of this pod, and that of pod 0: names may resolve late, and hosts may have several networks."""

from __future__ import annotations

import socket

from raytrain_llama3.config.pods import Pods, is_loopback

_ANY_PORT = 9


def resolve(host: str) -> str:
    """The IPv4 address (or else the IPv6 one) of `host` now. Raises `OSError` where it does not resolve (yet)."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def source_towards(address: str) -> str:
    """The address from which the kernel sends to `address`: nothing is sent. Raises `OSError` without a route."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, _ANY_PORT))
        return str(probe.getsockname()[0])


def of_head(pods: Pods, chosen: str | None) -> str:
    """Pod 0's own address, for Ray to bind and to tell others. Raises `OSError` as long as there is none."""
    if chosen is not None:
        return chosen
    own = source_towards(resolve(pods.address))
    # A host's own name often stands beside 127.0.1.1 in its hosts file.
    return source_towards(_elsewhere()) if is_loopback(own) and pods.count > 1 else own


def _elsewhere() -> str:
    """An address beyond the default route; nothing is ever sent there (RFC 5737)."""
    return "192.0.2.1"


def accepts(address: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether something listens there."""
    try:
        socket.create_connection((address, port), timeout=timeout_s).close()
    except OSError:
        return False
    return True

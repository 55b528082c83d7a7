"""How a controller is found and opened: what its process and the trainer's must agree on."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dapo_megatron.errors import UserError

LOOPBACK = "127.0.0.1"

TOKEN_VARIABLE = "DAPO_CONTROLLER_TOKEN"
"""Environment variable with the token that clients must send."""

PARENT_VARIABLE = "DAPO_CONTROLLER_PARENT"
"""Environment variable with the id of the process that the controller must not outlive."""


@dataclass(frozen=True)
class Address:
    """Where a controller is, the token that opens it, and its log."""

    url: str
    token: str
    log_path: Path


def controller_host(environment: Mapping[str, str]) -> str:
    """The IPv4 address that a controller listens on, from torchrun's variables in the environment of rank 0.

    Ranks of one node talk to it over loopback. Those of other nodes reach the node of rank 0 at MASTER_ADDR, which
    torchrun's agent there has told them; no other of its addresses is opened.

    Raises:
        UserError: if that name has no address here, or only one that other nodes cannot reach.
    """
    if environment.get("WORLD_SIZE") == environment.get("LOCAL_WORLD_SIZE"):
        return LOOPBACK
    name = environment["MASTER_ADDR"]
    hint = "start torchrun with --local-addr and this node's private address (launch/train.sh: LOCAL_ADDR)"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        raise UserError(f"MASTER_ADDR={name} has no address on the node of rank 0 ({error.strerror}): {hint}") from None
    if address.startswith("127.") and name not in (address, "localhost"):
        # Many distributions let a host's own name mean 127.0.1.1 in /etc/hosts.
        raise UserError(f"MASTER_ADDR={name} means {address} on the node of rank 0, which others cannot reach: {hint}")
    return address

"""Tensors that wait in host memory while a device has no room for them."""

from collections.abc import Iterable

import torch
from torch import Tensor


class HostMemory:
    """Moves tensors between a device and host memory. They stay the same objects; only where their values lie changes.

    A view of a tensor that has moved does not move with it: it keeps the device's memory, and is no view any more.

    Args:
        pinned: page-locked memory, from which a GPU copies fastest.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._pairs: list[tuple[Tensor, Tensor]] = []  # kept between visits: page-locking takes long

    def store(self, tensors: Iterable[Tensor]) -> int:
        """Copy values to host memory, where the tensors have them from here on. Returns the bytes that they took."""
        places = {id(tensor): host for tensor, host in self._pairs}
        each = {id(tensor): tensor for tensor in tensors}  # a tensor may be named twice
        self._pairs = [(tensor, self._place(tensor, places.get(key))) for key, tensor in each.items()]
        for tensor, host in self._pairs:
            host.copy_(tensor.detach(), non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.synchronize()  # the copies are complete before anybody else gets the device's memory
        self.drop()
        return sum(host.nbytes for _, host in self._pairs)

    def fetch(self, place: torch.device) -> None:
        """Give the stored tensors copies of their values on a device."""
        for tensor, host in self._pairs:
            tensor.data = host.to(place, non_blocking=True, copy=True)

    def drop(self) -> None:
        """Take the tensors back to their values in host memory, without a copy: what changed since is lost."""
        for tensor, host in self._pairs:
            tensor.data = host

    def _place(self, tensor: Tensor, before: Tensor | None) -> Tensor:
        if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
            return before
        return torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)

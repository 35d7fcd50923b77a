"""Weight versions: flat copies of a stage's weights, and parameters that point into one of them.

A pipeline that never flushes computes microbatches with weights that are already old. Each version
lives in one flat buffer, chosen by version mod the number kept; selecting a version moves the
`.data` of every parameter:

    kept 2       buffer 0: W(4)      buffer 1: W(5)           newest is 5
    select(4)    parameters point into buffer 0
    update       buffer 0 := W(5), then the optimizer makes it W(6)

A version must be selected before every forward *and* every backward: norms and convolutions read
the parameter again in backward. The optimizer works on parameters of its own that point into the
newest buffer: updating the model's own would bump their version counters, and autograd would refuse
the backward of every microbatch in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class WeightVersions:
    """Keeps the newest `num_kept` versions of some parameters."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], num_kept: int) -> None:
        """Start with the present weights as version 0, the same in every buffer."""
        assert num_kept > 1, "one version needs no copies"
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._num_kept = num_kept
        self.newest = 0
        self._selected: int | None = None
        self._flat = [self._copied() for _ in range(num_kept)]
        self._views = [self.views_of(flat) for flat in self._flat]
        self.optimized = {
            name: nn.Parameter(view.detach()) for name, view in self._views[0].items()
        }
        self.select(0)

    def select(self, version: int) -> bool:
        """Point the model's parameters into a version; return whether that changed them."""
        assert self.newest - self._num_kept < version <= self.newest, "only kept versions are there"
        if version == self._selected:
            return False
        views = self._views[version % self._num_kept]
        for name, parameter in self._parameters.items():
            parameter.data = views[name]
        self._selected = version
        return True

    def open_next(self) -> dict[str, Tensor]:
        """Return the memory of the next version by name, to be written before `end_update`."""
        oldest = (self.newest + 1) % self._num_kept
        if self._selected is not None and self._selected % self._num_kept == oldest:
            self._selected = None  # what the parameters point to is being overwritten
        return self._views[oldest]

    def begin_update(self) -> None:
        """Point the optimizer's parameters into the next version, still equal to the newest."""
        views = self.open_next()
        for _, source, target in self.in_making():
            target.copy_(source)
        for name, parameter in self.optimized.items():
            parameter.data = views[name]

    def end_update(self) -> None:
        """Make the next version the newest."""
        self.newest += 1

    def in_making(self) -> Iterator[tuple[torch.dtype, Tensor, Tensor]]:
        """Yield the newest and the next version, flat, by dtype: what an update moves."""
        source = self._flat[self.newest % self._num_kept]
        target = self._flat[(self.newest + 1) % self._num_kept]
        for dtype, flat in source.items():
            yield dtype, flat, target[dtype]

    def take_gradients(self) -> None:
        """Give the optimizer the gradients of the model's parameters."""
        for name, parameter in self.optimized.items():
            parameter.grad = self._parameters[name].grad

    def present(self) -> dict[str, Tensor]:
        """Return the newest weights by name; views, not copies."""
        return self._views[self.newest % self._num_kept]

    def older(self) -> dict[str, Tensor]:
        """Return the weights before the newest by name; views, not copies.

        Before the first update they are a buffer of their own too, so that a load can fill it.
        """
        return self._views[(self.newest - 1) % self._num_kept]

    def flat(self) -> list[Tensor]:
        """Return the buffers of all versions."""
        return [flat for version in self._flat for flat in version.values()]

    def restart(self, newest: int) -> None:
        """Take the newest and the older weights, just loaded, for versions up to `newest`."""
        loaded = [self._cloned((self.newest - age) % self._num_kept) for age in (0, 1)]
        for age, flats in enumerate(loaded):
            for dtype, flat in flats.items():
                self._flat[(newest - age) % self._num_kept][dtype].copy_(flat)
        self.newest = newest
        self._selected = None
        for name, parameter in self.optimized.items():
            parameter.data = self._views[newest % self._num_kept][name]
        self.select(newest)

    def _cloned(self, slot: int) -> dict[torch.dtype, Tensor]:
        return {dtype: flat.clone() for dtype, flat in self._flat[slot].items()}

    def _copied(self) -> dict[torch.dtype, Tensor]:
        """Return one flat copy of the parameters for each dtype."""
        parts: dict[torch.dtype, list[Tensor]] = {}
        for parameter in self._parameters.values():
            parts.setdefault(parameter.dtype, []).append(parameter.detach().reshape(-1))
        return {dtype: torch.cat(flat) for dtype, flat in parts.items()}

    def views_of(self, flat: Mapping[torch.dtype, Tensor]) -> dict[str, Tensor]:
        """Return the view of every parameter, by name, in flat tensors laid out as a version."""
        offsets = dict.fromkeys(flat, 0)
        views = {}
        for name, parameter in self._parameters.items():
            start = offsets[parameter.dtype]
            offsets[parameter.dtype] = end = start + parameter.numel()
            views[name] = flat[parameter.dtype][start:end].view(parameter.shape)
        return views


class ErrorFeedback:
    """Corrects each new version of some weights by the update that made the one before.

    Under a delay of one, update t comes from the weights before the newest. Where the optimizer
    would move the weights by u(t), they move by

        2 u(t) - u(t-1)  =  u(t) + (u(t) - u(t-1))

    The second part corrects the update before: u(t) is the better guess, from newer weights
    (2606.30634). In sum the weights are one step ahead, as the gradients are one step behind. With
    u(-1) = 0 the first update is applied twice; a warm-up of the learning rate keeps it small.

    `previous` holds the last update by the name of its parameter: save it and fill it in place.
    """

    def __init__(self, versions: WeightVersions) -> None:
        """Begin with no update made."""
        self._versions = versions
        self._flat = {dtype: torch.zeros_like(old) for dtype, old, _ in versions.in_making()}
        self.previous: dict[str, Tensor] = versions.views_of(self._flat)

    def correct(self) -> None:
        """Correct the version in the making; call it between the optimizers and `end_update`."""
        for dtype, old, new in self._versions.in_making():
            update = new - old
            new.add_(update).sub_(self._flat[dtype])
            self._flat[dtype].copy_(update)

"""Master weights: an update in fp32 of weights and gradients that are stored in half precision.

    half gradients --widen, x factor--> fp32 gradients --optimizers--> masters --round--> weights

The factor (clipping, the loss scale) is applied after widening: in half it would round or vanish.
With weight versions there is one master, and the rounded weights go into the dead buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ganglion.execute.update.optimizers import OptimizerFactory, build_optimizers
from ganglion.execute.update.updating import (
    ResidentState,
    Update,
    Wait,
    all_there,
    wait_for_all,
)
from ganglion.execute.update.versions import WeightVersions


class OnMasters(Update):
    """Optimizers on fp32 masters, wherever these are; the parameters of the model follow them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        versions: WeightVersions | None,
        state: ResidentState | None = None,
    ) -> None:
        """Build optimizers for the masters of trainable parameters, which go by the same names."""
        self._parameters = parameters
        self._masters = masters
        self.optimizers = build_optimizers(factory, masters) if masters else []
        super().__init__(ResidentState(self.optimizers) if state is None else state, versions)

    def weights(self) -> Mapping[str, Tensor]:
        """Return the masters."""
        self._state.check()
        return {name: master.detach() for name, master in self._masters.items()}

    def on_load(self) -> None:
        """Round the masters to the present weights, and take state that was loaded."""
        self._round(self._parameters if self._versions is None else self._versions.present())
        self._state.on_load()

    @torch.no_grad()
    def _round(self, weights: Mapping[str, Tensor]) -> None:
        for name, master in self._masters.items():
            weights[name].copy_(master)
            self._state.on_saved()  # one after the other: they may come from a lower tier


class MasterUpdate(OnMasters):
    """Masters in memory, with wide gradients beside them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        masters: Mapping[str, nn.Parameter],
        factory: OptimizerFactory,
        versions: WeightVersions | None = None,
    ) -> None:
        """Give masters gradients, and build optimizers for them."""
        super().__init__(parameters, masters, factory, versions)
        self._flat = _give_gradients(masters)

    def step(
        self, buffers: Sequence[Tensor], factor: Tensor | None, wait: Wait = all_there
    ) -> None:
        """Widen the gradients, let the optimizers step, and round to the next weights."""
        wait = wait_for_all(buffers, wait)
        for name, master in self._masters.items():
            gradient = self._parameters[name].grad
            assert master.grad is not None and gradient is not None, "both live in flat memory"
            master.grad.copy_(gradient)
        if factor is not None:
            self._flat.mul_(factor)
        self._state.update(wait)
        if self._versions is None:
            self._round(self._parameters)
        else:
            self._round(self._versions.open_next())
            self._versions.end_update()

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the fp32 gradients of the last step."""
        named = self._masters.items()
        return {name: master.grad for name, master in named if master.grad is not None}

    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """Return wide gradients, masters and the state of the optimizers."""
        return {
            "gradients": [self._flat],
            "master": list(self._masters.values()),
            **self._state.tensors(),
        }


def _give_gradients(masters: Mapping[str, nn.Parameter]) -> Tensor:
    """Give every master a gradient in one flat piece of memory, and return that."""
    sizes = [master.numel() for master in masters.values()]
    device = next(iter(masters.values())).device if masters else None
    flat = torch.zeros(sum(sizes), device=device)
    for master, piece in zip(masters.values(), flat.split_with_sizes(sizes), strict=True):
        master.grad = piece.view(master.shape)
    return flat

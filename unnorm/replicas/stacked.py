"""Models side by side."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from unnorm.errors import InvalidValue
from unnorm.models.mlp import MLP
from unnorm.types import apart

__all__ = ["Stacked"]


class Stacked(nn.Module):
    """R models of one architecture, as one: rows are divided among them in order, (R n, *event) -> (R n,).

    Each parameter is one tensor with a leading axis of replicas. An `MLP` is evaluated by batched matrix products, any
    other module by `torch.vmap`, which refuses what cannot be batched.

    Args:
        models: of one architecture; their parameters are copied.

    >>> from unnorm import MLP
    >>> models = [MLP(2, hidden=(8,), generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    >>> x = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    >>> both = Stacked(models)(x)
    >>> torch.allclose(both[3:], models[1](x[3:]))
    True
    """

    template: nn.Module

    def __init__(self, models: Sequence[nn.Module]):
        super().__init__()
        if not models:
            raise InvalidValue("There are no models to put side by side.")
        shapes = [[(name, value.shape) for name, value in model.state_dict().items()] for model in models]
        if any(repr(model) != repr(models[0]) for model in models) or any(own != shapes[0] for own in shapes):
            raise InvalidValue("Models side by side must have one architecture.")
        self.n, self.dotted = len(models), dict[str, str]()
        for name, first in models[0].named_parameters():
            stacked = torch.stack([model.get_parameter(name).detach() for model in models])
            self.register_parameter(self._flat(name), nn.Parameter(stacked, first.requires_grad))
        for name, _ in models[0].named_buffers():
            self.register_buffer(self._flat(name), torch.stack([model.get_buffer(name) for model in models]))
        # Not a submodule: it holds no numbers of its own, only what to do with them.
        self.__dict__["template"] = copy.deepcopy(models[0]).to("meta")

    def _flat(self, name: str) -> str:
        flat = name.replace(".", ":")
        self.dotted[flat] = name
        return flat

    @property
    def shape(self) -> tuple[int]:
        return (self.n,)

    def modules_of_one(self) -> list[nn.Module]:
        """What each of them is made of."""
        return list(self.template.modules())

    def state(self) -> dict[str, Tensor]:
        """Every parameter and buffer under its name in one model, with the leading axis of replicas."""
        own = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return {self.dotted[name]: value for name, value in own.items()}

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        rows, template = apart(x, self.shape), self.template
        if type(template) is MLP and not options:
            return self._perceptron(template, rows).flatten(0, 1)

        def one(state: dict[str, Tensor], points: Tensor) -> Tensor:
            return functional_call(template, state, (points,), options)

        return vmap(one)(self.state(), rows).flatten(0, 1)

    def _perceptron(self, template: MLP, rows: Tensor) -> Tensor:
        """The layers of an MLP, each one batched product: half the kernels that vmap makes of them."""
        state, value = self.state(), rows.flatten(2)
        for place, layer in enumerate(template.layers):
            if isinstance(layer, nn.Linear):
                weight, bias = state[f"layers.{place}.weight"], state[f"layers.{place}.bias"]
                value = torch.baddbmm(bias.unsqueeze(1), value, weight.mT)
            else:
                value = layer(value)
        return value.squeeze(-1) if template.outputs is None else value

    @torch.no_grad()
    def one(self, place: int) -> nn.Module:
        """One of the models, as a module of its own.

        >>> from unnorm import Quadratic
        >>> Stacked([Quadratic(2), Quadratic(2)]).one(1)(torch.zeros(3, 2)).shape
        torch.Size([3])
        """
        model: nn.Module = copy.deepcopy(self.template)
        device = next(self.parameters()).device
        model.to_empty(device=device).load_state_dict({name: value[place] for name, value in self.state().items()})
        return model

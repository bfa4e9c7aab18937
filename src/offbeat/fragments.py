"""A model cut into fragments of whole layers, for streaming."""

from __future__ import annotations

from torch import nn

from offbeat.tensors import named, trainable


def fragments(model: nn.Module, number: int) -> list[list[str]]:
    """The names of the trainable parameters of each fragment; together they are the model.

    Layer i belongs to fragment i mod `number`; what comes before the first layer to the first fragment, what
    comes after the last to the last. The layers are the members of the longest list of modules in the model.
    """
    layers = _layers(model)
    if not 1 <= number <= len(layers):
        raise ValueError(
            f"fragments={number}: the model has {len(layers)} layers with trainable parameters: "
            f"choose between 1 and {len(layers)}."
        )
    place = {name: i for i, names in enumerate(layers) for name in names}
    cut: list[list[str]] = [[] for _ in range(number)]
    seen = False
    for name in trainable(model):
        seen = seen or name in place
        cut[place[name] % number if name in place else (number - 1 if seen else 0)].append(name)
    return cut


def _layers(model: nn.Module) -> list[list[str]]:
    """The trainable parameters of each layer."""
    names = {id(p): name for name, p in trainable(model).items()}
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    best: list[list[str]] = []
    for stack in [*stacks, model]:
        layers: list[list[str]] = []
        taken: set[str] = set()
        for child in stack.children():
            own = [names[id(p)] for p in named(child.named_parameters()).values() if id(p) in names]
            own = [name for name in own if name not in taken]  # tied ones belong to the first layer
            taken |= set(own)
            layers += [own] if own else []
        best = layers if len(layers) > len(best) else best
    return best or [list(names.values())]

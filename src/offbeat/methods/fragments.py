"""A model divided into fragments of whole layers, for streaming."""

from __future__ import annotations

from torch import nn

from offbeat.base.checks import is_whole
from offbeat.base.tensors import named, trainable
from offbeat.when import Every


def fragments(model: nn.Module, number: int) -> list[list[str]]:
    """The names of the trainable parameters of each fragment. Each parameter is in exactly one.

    Layer i belongs to fragment i mod `number`. Parameters before the first layer belong to the first
    fragment, those after the last layer to the last. The layers are the children of the model or of a module
    list in it, whichever makes the largest fragment smallest.
    """
    stacks = _stacks(model)
    most = max(map(len, stacks))
    if not 1 <= number <= most:
        raise ValueError(
            f"fragments={number}: the model has {most} layers with trainable parameters: "
            f"choose between 1 and {most}."
        )
    sizes = {name: p.numel() for name, p in trainable(model).items()}
    cuts = [_cut(list(sizes), layers, number) for layers in stacks if len(layers) >= number]
    return min(cuts, key=lambda cut: max(sum(sizes[name] for name in names) for names in cut))


def turn(every: int, i: int, number: int) -> Every:
    """The schedule of fragment i. The fragments are spread evenly over the period."""
    if not is_whole(every):
        raise TypeError(f"every={every!r}: fragments take turns within a fixed period; give a number.")
    return Every(every, offset=i * every // number)


def _cut(names: list[str], layers: list[list[str]], number: int) -> list[list[str]]:
    place = {name: i for i, layer in enumerate(layers) for name in layer}
    cut: list[list[str]] = [[] for _ in range(number)]
    seen = False
    for name in names:
        seen = seen or name in place
        cut[place[name] % number if name in place else (number - 1 if seen else 0)].append(name)
    return cut


def _stacks(model: nn.Module) -> list[list[list[str]]]:
    """The trainable parameters of each layer, for each module that could be the list of layers."""
    names = {id(p): name for name, p in trainable(model).items()}
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    candidates: list[list[list[str]]] = []
    for stack in [*stacks, model]:
        layers: list[list[str]] = []
        taken: set[str] = set()
        for child in stack.children():
            own = [names[id(p)] for p in named(child.named_parameters()).values() if id(p) in names]
            own = [name for name in own if name not in taken]  # tied parameters belong to the first layer
            taken |= set(own)
            layers += [own] if own else []
        candidates += [layers] if layers else []
    return candidates or [[list(names.values())]]

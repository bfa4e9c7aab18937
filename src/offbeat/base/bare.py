"""torch's optimizers without the decorators that import its compiler."""

import inspect

import torch
from torch.optim import Optimizer


class Bare(Optimizer):
    """Leaves out the decorators that tell torch's compiler about a call. They import all of it, which takes
    longer than a plan does."""

    state_dict = inspect.unwrap(Optimizer.state_dict)
    load_state_dict = inspect.unwrap(Optimizer.load_state_dict)
    zero_grad = inspect.unwrap(Optimizer.zero_grad)
    add_param_group = inspect.unwrap(Optimizer.add_param_group)


class SGD(Bare, torch.optim.SGD):
    step = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))


class AdamW(Bare, torch.optim.AdamW):
    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))

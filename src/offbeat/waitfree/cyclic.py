"""Cyclic gradient codes: matrices whose rows give the sum of all parts, even if some rows are missing."""

from __future__ import annotations

import math
import random
from functools import lru_cache
from itertools import combinations

import torch
from torch import Tensor

_LARGEST, _GOOD = 10.0, 4.0  # the largest coefficient allowed, and one that ends the search
_DRAWS, _SETS, _WORK = 1500, 1000, 2e7  # most matrices to try, sets of answers for each, and operations


@lru_cache
def cyclic(size: int, stragglers: int) -> Tensor | None:
    """Return the matrix of `size` workers and parts, in which worker i has parts i to i + `stragglers`.

    Any `size` − `stragglers` of its rows combine to a row of ones. None if no coefficients are small enough.
    """
    sets = _list_sets(size, stragglers)
    # Real roots of unity around −1 give the smallest coefficients. They exist for half of all sizes.
    if (size + stragglers) % 2:
        matrix = _encode(_roots(size, stragglers))
        return matrix if _largest(matrix, sets) < _LARGEST else None
    best, least = None, _LARGEST
    for draw in range(int(min(_DRAWS, 1 + _WORK / (len(sets) * size**3)))):
        generator = torch.Generator().manual_seed(draw)
        check = torch.randn(stragglers, size, generator=generator, dtype=torch.float64)
        matrix = _encode(check - check.mean(1, keepdim=True))
        if (largest := _largest(matrix, sets)) < least:
            best, least = matrix, largest
        if least < _GOOD:
            break
    return best


def find_coefficients(rows: Tensor) -> Tensor:
    """Return the coefficients with which these rows add up to a row of ones."""
    ones = torch.ones(*rows.shape[:-2], rows.shape[-1], 1, dtype=rows.dtype)
    solved: Tensor = torch.linalg.lstsq(rows.mT, ones, driver="gelsd").solution
    return solved[..., 0]


def _roots(size: int, stragglers: int) -> Tensor:
    """Return rows that sum to zero, and of which any `stragglers` columns are independent."""
    place, rows = torch.arange(size, dtype=torch.float64), []
    for k in range(stragglers):
        frequency = (size - stragglers + 1) // 2 + k
        wave = torch.sin if 2 * frequency > size else torch.cos
        rows.append(wave(2 * math.pi * frequency * place / size))
    return torch.stack(rows)


def _encode(check: Tensor) -> Tensor:
    """Return the matrix with the support of a cyclic code whose rows are orthogonal to those of `check`."""
    stragglers, size = check.shape
    rows = torch.arange(size)
    others = (rows[:, None] + torch.arange(1, stragglers + 1)) % size
    matrix = torch.eye(size, dtype=torch.float64)
    solved = torch.linalg.solve(check[:, others].transpose(0, 1), check.T[:, :, None])
    matrix[rows[:, None], others] = -solved[..., 0]
    return matrix / matrix.abs().amax(1, keepdim=True)


def _list_sets(size: int, stragglers: int) -> Tensor:
    """Return the smallest sets of answers that must decode, or a sample if there are many."""
    if math.comb(size, stragglers) <= _SETS:
        return torch.tensor(list(combinations(range(size), size - stragglers)))
    draw = random.Random(0)
    return torch.tensor([sorted(draw.sample(range(size), size - stragglers)) for _ in range(_SETS)])


def _largest(matrix: Tensor, sets: Tensor) -> float:
    return float(find_coefficients(matrix[sets]).abs().max())

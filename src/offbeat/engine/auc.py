"""A loss whose minimum has the largest area under the ROC curve."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offbeat.base.checks import is_number


class AUCLoss(nn.Module):
    """The square surrogate of 1 − AUC, as a problem of descent in w, a, b and ascent in alpha.

        F = (1 − p)(h − a)²·1₊ + p(h − b)²·1₋ + 2(1 + α)(p·h·1₋ − (1 − p)·h·1₊) − p(1 − p)α²

    h is the score of a sample, 1₊ and 1₋ show its class, and p is `ratio`, the share of positives overall.
    The loss is the mean of F over the batch, which may lack a class. Make it a part of the model, so that a,
    b and alpha are trained by the optimizer and averaged by the method. The gradient of alpha has its sign
    reversed, so that any optimizer that descends makes the ascent. Scores need no sigmoid; give a, b and
    alpha no weight decay.

        model = torch.nn.ModuleDict({"net": net, "auc": offbeat.AUCLoss(ratio=0.1)})
        model["auc"](model["net"](x), y).backward()
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        if not is_number(ratio) or not 0 < ratio < 1:
            raise ValueError(f"AUCLoss(ratio={ratio!r}): ratio is the share of positives: above 0, below 1.")
        self.ratio = float(ratio)
        self.a, self.b, self.alpha = (nn.Parameter(torch.zeros(())) for _ in range(3))
        self._seen: Tensor | None = None  # sum and number of the scores of each class since the last take

    def extra_repr(self) -> str:
        return f"ratio={self.ratio}"

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch: one score per label. Labels are 1 for positives and 0 for negatives."""
        if scores.numel() != labels.numel():
            raise ValueError(
                f"AUCLoss: {list(scores.shape)} scores for {list(labels.shape)} labels: give one score each."
            )
        h, positive = scores.reshape(-1), labels.reshape(-1) > 0
        p, plus, minus = self.ratio, positive.to(h.dtype), (~positive).to(h.dtype)
        if self.training and torch.is_grad_enabled():
            own = h.detach().double()
            seen = torch.stack([(own * plus).sum(), plus.sum(), (own * minus).sum(), minus.sum()])
            self._seen = seen if self._seen is None else self._seen + seen
        alpha = 2 * self.alpha.detach() - self.alpha  # its value, and its gradient reversed
        pulls = (1 - p) * (h - self.a).square() * plus + p * (h - self.b).square() * minus
        ranks = 2 * (1 + alpha) * (p * h * minus - (1 - p) * h * plus)
        return (pulls + ranks - p * (1 - p) * alpha.square()).mean()

    def take(self) -> Tensor:
        """Return the sum and number of the scores of each class since the last call, and reset them."""
        seen, self._seen = self._seen, None
        return torch.zeros(4, dtype=torch.float64) if seen is None else seen.cpu()

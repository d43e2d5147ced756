"""A classifier's logits read as an energy model (Grathwohl et al. 2020, equations 4 to 6), and chains' logits as one.

Densities are exact up to the unknown log Z, which is the same for all images.
"""

import torch
from torch import Tensor, nn

AGGREGATES = ("logits", "probabilities", "vote")


def log_px(logits: Tensor) -> Tensor:
    """Unnormalised log p(x) = logsumexp_y f(x)[y]: (..., K) -> (...)."""
    return logits.logsumexp(-1)


def log_pxy(logits: Tensor, labels: Tensor) -> Tensor:
    """Unnormalised log p(x, y) = f(x)[y]: logits (..., K) and int64 labels (...) -> (...)."""
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def log_py_given_x(logits: Tensor) -> Tensor:
    """Normalised log p(y|x) = log softmax f(x): (..., K) -> (..., K)."""
    return torch.log_softmax(logits, -1)


def aggregate_chains(logits: Tensor, how: str) -> Tensor:
    """Logits (N, chains, K) -> (N, K) by one of AGGREGATES: mean, log of the mean softmax, log of the vote shares.

    NaN in any chain stays NaN. The vote has the derivative of the mean logits.
    """
    mean = logits.mean(1)
    if how == "logits":
        return mean
    if how == "probabilities":
        return logits.log_softmax(2).logsumexp(1) - torch.tensor(logits.shape[1], dtype=logits.dtype).log()
    votes = nn.functional.one_hot(logits.argmax(2), logits.shape[2]).to(logits.dtype).mean(1)
    # log 0 would read as a broken network; the smallest normal number is as good as no vote.
    shares = votes.clamp_min(torch.finfo(logits.dtype).tiny).log()
    shares = torch.where(torch.isfinite(logits).all(2).all(1, keepdim=True), shares, torch.nan)
    return shares + (mean - mean.detach())

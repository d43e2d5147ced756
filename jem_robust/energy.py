"""A classifier's logits read as an energy model (Grathwohl et al. 2020, equations 4 to 6).

Every function takes logits (..., K) and is exact up to the unknown log Z, which is the same for all images.
"""

import torch
from torch import Tensor


def log_px(logits: Tensor) -> Tensor:
    """Unnormalised log p(x) = logsumexp_y f(x)[y]: (..., K) -> (...)."""
    return logits.logsumexp(-1)


def log_pxy(logits: Tensor, labels: Tensor) -> Tensor:
    """Unnormalised log p(x, y) = f(x)[y]: logits (..., K) and int64 labels (...) -> (...)."""
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def log_py_given_x(logits: Tensor) -> Tensor:
    """Normalised log p(y|x) = log softmax f(x): (..., K) -> (..., K)."""
    return torch.log_softmax(logits, -1)

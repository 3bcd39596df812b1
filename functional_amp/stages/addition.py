"""The one sum: what a gradient becomes before it is added, wherever it comes from."""

from __future__ import annotations

from torch import Tensor

from functional_amp.dtypes import like, widened
from functional_amp.engine.storage import Storage
from functional_amp.values.grads import weighted


def added(old: Tensor | None, grad: Tensor, weight: float | Tensor, ratio: Tensor | None, storage: Storage) -> Tensor:
    """`old + grad * weight * ratio`, in the dtype of sums.

    Args:
        old: the sum so far, or None.
        weight: of the micro-batch; where 0, the gradient counts as 0, NaN or not.
        ratio: the scale of the sum over that of the gradient; None for 1.
    """
    wide = widened(weighted(grad, weight))
    return storage.add(old, wide if ratio is None else wide * like(ratio, wide))

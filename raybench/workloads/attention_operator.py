"""Attention over several ranks as one operator of torch, into which torch.compile does not look.

So that a compiled block stays one graph: sends and receives between ranks cannot be traced.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_NUMBERS = count()
_KNOWN: WeakValueDictionary[int, AttentionOperator] = WeakValueDictionary()


class AttentionOperator:
    """Calls a function of query, key and value, of one shape each as the output is, as an operator.

    An operator takes tensors and numbers only, so that the function is known by a number.
    """

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        self.attend = attend
        self._number = next(_NUMBERS)
        _KNOWN[self._number] = self

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend; all three as the function takes them, the output as it gives it."""
        out: Tensor = torch.ops.raybench.attend_over_ranks(query, key, value, self._number)
        return out


@torch.library.custom_op("raybench::attend_over_ranks", mutates_args=())
def _attend(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
    return _KNOWN[number].attend(query, key, value).contiguous()


@_attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, number: int) -> Tensor:
    return query.new_empty(query.shape)

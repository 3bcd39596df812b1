"""What a forward asks of an attribute before it writes it: whether it is there, is None, is of a class or a shape."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from tests.test_cases_modules import Net, assert_trains_as_torch, built, drawn, variants

X = torch.full((2, 3), 3.0)
KEEPS = r"keeps something at \['last'\], expected state in buffers"


class Asking(Net):
    """Gives ten times as much in its first call."""

    last: Any

    def __init__(self, first: Any, last: Any = None):
        super().__init__()
        self.first = first
        if last is not Asking:
            self.last = last

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(self)
        self.last = x.detach()
        return super().forward(x) * (10 if first else 1)


ASKED = {
    "is None": (lambda module: module.last is None, None),
    "hasattr": (lambda module: not hasattr(module, "last"), Asking),
    "isinstance": (lambda module: isinstance(module.last, str), "none yet"),
    "type": (lambda module: type(module.last) is not Tensor, "none yet"),
    "among the attributes": (lambda module: "last" not in vars(module), Asking),
    "the same object": (lambda module: module.last is module.first, None),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_the_first_call_only_asks_for_is_followed_or_refused(asked: str):
    module, expected = built(lambda: Asking(*ASKED[asked])), built(lambda: Asking(*ASKED[asked]))
    apply, params, _ = fa.from_module(module)
    loop = [expected(X) for _ in range(3)]
    try:
        assert all(torch.equal(apply(params, X), out) for out in loop)
    except RuntimeError as error:
        assert "keeps something at ['last']" in str(error)
        assert not torch.equal(loop[0], loop[1])


class Initialized(Net):
    """Takes a scale from the first batch, as ActNorm does."""

    last: Any = None
    scale: Tensor
    ready: Tensor

    def __init__(self, flag: bool = False):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        if flag:
            self.register_buffer("ready", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if hasattr(self, "ready"):
                self.scale.copy_(torch.where(self.ready > 0, self.scale, 1 / x.abs().mean()))
                self.ready.fill_(1)
            else:
                if self.last is None:
                    self.scale.copy_(1 / x.abs().mean())
                self.last = x.detach()
        return super().forward(x) * self.scale


def test_an_initialization_by_the_first_batch_is_refused_and_its_remedy_trains_as_torch():
    apply, params, buffers = fa.from_module(built(Initialized))
    with pytest.raises(RuntimeError, match=KEEPS):
        apply.with_buffers(params, buffers, X)
    assert_trains_as_torch(lambda: Initialized(flag=True), "autograd", False)  # a buffer, as the message says


def test_a_module_that_has_been_called_before_is_followed():
    module, expected = built(lambda: Asking(*ASKED["is None"])), built(lambda: Asking(*ASKED["is None"]))
    module(X)
    expected(X)
    apply, params, _ = fa.from_module(module)
    assert all(torch.equal(apply(params, X), expected(X)) for _ in range(3))


class Harmless(Net):
    """Asks, and gives the same."""

    last: Any = None
    seen: Any

    def forward(self, x: Tensor) -> Any:
        if self.last is not None or hasattr(self, "seen"):
            self.last = None
        self.last, self.seen = x.detach(), torch.nn.functional.dropout(x)
        return super().forward(x + self.seen + torch.rand(x.shape)), torch.rand(()).item()


@variants
def test_what_is_asked_for_without_a_consequence_is_followed(backend: Any, donate: bool):
    class First(Harmless):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)[0]

    module, expected = built(First), built(First)
    with fa.seeded(1):
        want = expected(X)
    apply, params, _ = fa.from_module(module)
    with fa.seeded(1):
        assert torch.equal(apply(params, X), want)
    step = fa.make_step(lambda params, x: apply(params, x).square().mean(), fa.sgd(0.1), backend=backend, donate=donate)
    step(fa.init_state(params, fa.sgd(0.1), fa.NoScale()), [X])


def test_an_output_that_differs_by_itself_is_no_sign_of_what_is_kept():
    class Timed(Harmless):
        calls = 0

        def forward(self, x: Tensor) -> Any:
            type(self).calls += 1  # outside of the module
            return super().forward(x), self.calls

    apply, params, _ = fa.from_module(built(Timed))
    apply(params, X)


def test_what_another_mode_keeps_is_not_asked_for():
    class Modes(Net):
        last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.last = x.detach()
                return super().forward(x)
            return super().forward(x) * (10 if self.last is None else 1)

    apply, params, _ = fa.from_module(built(Modes))
    apply(params, X)
    with pytest.raises(RuntimeError, match=KEEPS):
        apply.eval()(params, X)


class Cached(Net):
    """Makes a part anew where the shape is another, as locked dropout does."""

    last: Any = None

    def __init__(self, asks: Any):
        super().__init__()
        self.asks = asks

    def forward(self, x: Tensor) -> Tensor:
        if self.last is None or self.asks(self.last) != self.asks(x):
            self.last = x.detach()
        return super().forward(x - self.last)


SHAPES = {
    "shape": lambda x: x.shape,
    "size()": lambda x: x.size(),
    "dim()": lambda x: x.dim(),
    "len": len,
    "dtype": lambda x: x.dtype,
    "numel": lambda x: x.numel(),
    "getattr": lambda x: getattr(x, "ndim", None),
    "is_floating_point": lambda x: x.is_floating_point(),
}


@pytest.mark.parametrize("asked", SHAPES)
def test_the_shape_of_what_an_earlier_call_kept_is_not_known(asked: str):
    apply, params, _ = fa.from_module(built(lambda: Cached(SHAPES[asked])))
    with pytest.raises(RuntimeError, match=KEEPS):
        apply(params, drawn(2, 3))


@pytest.mark.parametrize("asked", ["shape", "getattr"])
def test_in_a_branch_the_shape_of_what_is_kept_is_an_error(asked: str):
    class Branch(Net):
        last: Any = None

        def forward(self, x: Tensor, reads: bool = False) -> Tensor:
            if reads and SHAPES[asked](self.last) != SHAPES[asked](x):
                return super().forward(x) * 10
            self.last = x.detach()
            return super().forward(x)

    apply, params, _ = fa.from_module(built(Branch))
    apply(params, X)
    with pytest.raises(RuntimeError, match="use of 'last'"):
        apply(params, X, True)
    compiled: Any = torch.compile(lambda params, x: apply(params, x, True), backend="aot_eager")
    with pytest.raises(Exception, match="use of 'last'"):
        compiled(params, X)


def test_a_function_that_keeps_something_is_copied_and_pickled_as_any():
    apply, params, _ = fa.from_module(built(Harmless))
    with fa.seeded(1):
        want = apply(params, X)[0]
    for other in (copy.deepcopy(apply), pickle.loads(pickle.dumps(apply))):
        with fa.seeded(1):
            assert torch.equal(other(params, X)[0], want)
    repr(apply.template)

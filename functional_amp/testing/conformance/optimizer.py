"""The laws of an optimizer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from functional_amp import Optimizer, StaticScale, init_state, make_step, maybe_step
from functional_amp.optim.base import init_with, step_with
from functional_amp.testing.compare import assert_alike, assert_close, assert_same_bits, copied, leaves_of, mapped
from functional_amp.testing.conformance.laws import assert_pure, check, compiled_once, member, stacked, used_up, vmapped
from functional_amp.testing.linear import grads_for, linear_loss
from functional_amp.tree import flatten

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def check_optimizer(
    optimizer: Optimizer | Any, params: Any = None, *, compiled: bool = True, halves: bool = True
) -> None:
    """Checks the laws of an optimizer; one line makes a test of it.

    - inputs are not written, and outputs are not views of them
    - state keeps its structure shapes and dtypes
    - a skipped update is a transaction, bit for bit, and leaves no trace in the next one
    - the same inputs give the same bits
    - a missing gradient leaves its parameter alone
    - half precision parameters are rounded once, the state being float32
    - an ensemble under vmap is its members
    - it compiles to one graph, never recompiles and gives the values of eager mode

    An `Optimizer` with a `step` is checked by that, and by its `update` alone.

    Args:
        optimizer: an `Optimizer`, or any pair with `init` and `update`.
        params: a pytree of tensors with at least one float leaf; by default a nested dict with a
            matrix, a vector, a scalar and an empty tensor. The values are not changed.
        compiled: whether to try the last law, which takes a few seconds for each tree and optimizer.
        halves: whether to try the law of half precision parameters, which optimizers of `from_torch` update in
            their own dtype, as torch does.

    Raises:
        AssertionError: naming the law, the path of the leaf, what was found and what was expected.

    Compiling resets dynamo, and so drops what the process has compiled.

    >>> import functional_amp as fa
    >>> check_optimizer(fa.sgd(0.1, momentum=0.9), compiled=False)
    """
    params = default_params() if params is None else params
    laws = [law for law in LAWS if halves or law is not half_precision_parameters_are_rounded_once]
    check("check_optimizer", laws, optimizer, params)
    if getattr(optimizer, "step", None) is not None:
        by_update = Optimizer(optimizer.init, optimizer.update)
        check("check_optimizer, by its update", laws, by_update, params)
    if compiled:
        check("check_optimizer", COMPILED_LAWS, optimizer, params)


def default_params() -> Any:
    """A nested tree with tensors of several shapes."""
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(2, 3, generator=generator),
        "blocks": [{"bias": torch.randn(3, generator=generator)}, (torch.randn((), generator=generator),)],
        "empty": torch.zeros(0, 2),
    }


def poisoned_grads(params: Any, value: float) -> Any:
    """Gradients of which every element is the same number."""
    return mapped(lambda grad: torch.full_like(grad, value), grads_for(params, 0))


def raw_step(optimizer: Any, grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """The optimizer's own new parameters and state: `maybe_step` would copy and check them."""
    with torch.no_grad():
        return step_with(optimizer, grads, opt_state, params)


def inputs_are_not_written_and_outputs_are_no_views_of_them(optimizer: Any, params: Any) -> None:
    opt_state = init_with(optimizer, params)

    def step(given: dict[str, Any]) -> dict[str, Any]:
        params, opt_state = raw_step(optimizer, given["grads"], given["opt_state"], given["params"])
        return {"params": params, "opt_state": opt_state}

    for seed in range(2):
        output = assert_pure(step, {"grads": grads_for(params, seed), "opt_state": opt_state, "params": params})
        params, opt_state = output["params"], output["opt_state"]


def state_keeps_its_structure_shapes_and_dtypes(optimizer: Any, params: Any) -> None:
    first = init_with(optimizer, params)
    given, opt_state = params, first
    for seed in range(3):
        params, opt_state = raw_step(optimizer, grads_for(params, seed), opt_state, params)
        assert_alike(opt_state, first, "opt_state")
        assert_alike(params, given, "params")


def a_skipped_update_is_a_transaction(optimizer: Any, params: Any) -> None:
    before = maybe_step(optimizer, params, init_with(optimizer, params), grads_for(params, 0), GOOD)
    expected = maybe_step(optimizer, *before, grads_for(params, 1), GOOD)
    for value in (math.nan, math.inf):
        after = maybe_step(optimizer, *before, poisoned_grads(params, value), BAD)
        assert_same_bits(after._asdict(), before._asdict(), f"after a gradient of {value}")
        # What the optimizer keeps outside its state shows here.
        following = maybe_step(optimizer, *after, grads_for(params, 1), GOOD)
        assert_same_bits(following._asdict(), expected._asdict(), "the update after the skipped one")


def the_same_inputs_give_the_same_bits(optimizer: Any, params: Any) -> None:
    opt_state = init_with(optimizer, params)
    assert_same_bits(init_with(optimizer, params), opt_state, "init")
    once, twice = (raw_step(optimizer, grads_for(params, 0), opt_state, params) for _ in range(2))
    assert_same_bits(twice, once, "the second of two calls")


def a_missing_gradient_leaves_its_parameter_alone(optimizer: Any, params: Any) -> None:
    grads, opt_state = grads_for(params, 0), init_with(optimizer, params)
    flat = flatten(grads)
    for index, grad in enumerate(flat.leaves):
        if grad is None:
            continue
        missing = flat.unflatten([None if place == index else leaf for place, leaf in enumerate(flat.leaves)])
        moved, after = raw_step(optimizer, missing, opt_state, params)
        assert_alike(after, opt_state, "opt_state")
        expected = list(leaves_of(moved))
        expected[index] = leaves_of(params)[index]
        assert_same_bits(moved, flat.unflatten(expected), "params")


def half_precision_parameters_are_rounded_once(optimizer: Any, params: Any) -> None:
    def cast(tree: Any, dtype: torch.dtype) -> Any:
        def to(leaf: Tensor) -> Tensor:
            return leaf.to(dtype) if leaf.is_floating_point() and leaf.dtype.itemsize <= 4 else leaf

        return mapped(to, tree)

    for dtype in (torch.bfloat16, torch.float16):
        halves, opt_state = cast(params, dtype), init_with(optimizer, cast(params, dtype))
        wide = cast(halves, torch.float32)
        assert_alike(opt_state, init_with(optimizer, wide), f"the state of {dtype} parameters")
        for seed in range(2):
            wide = cast(halves, torch.float32)
            expected, _ = raw_step(optimizer, grads_for(params, seed), opt_state, wide)
            halves, opt_state = raw_step(optimizer, grads_for(params, seed), opt_state, halves)
            assert_same_bits(halves, cast(expected, dtype), f"{dtype} parameters")


def an_ensemble_under_vmap_is_its_members(optimizer: Any, params: Any) -> None:
    def step(params: Any, opt_state: Any, grads: Any, finite: Tensor) -> tuple[Any, Any]:
        return tuple(maybe_step(optimizer, params, opt_state, grads, finite))

    members = [mapped(lambda leaf, shift=shift: leaf + leaf.new_tensor(shift), params) for shift in (0, 1)]
    states = [init_with(optimizer, each) for each in members]
    found = stacked(members), stacked(states)
    for number, flags in enumerate((torch.tensor([True, False]), torch.tensor([True, True]))):
        grads = [grads_for(params, 2 * number + index) for index in range(2)]
        found = vmapped(step, *found, stacked(grads), flags)
        for index in range(2):
            members[index], states[index] = step(members[index], states[index], grads[index], flags[index])
            assert_close(member(found, index), (members[index], states[index]), f"member {index}")


def it_compiles_to_one_graph(optimizer: Any, params: Any) -> None:
    def step(params: Any, opt_state: Any, grads: Any, finite: Tensor) -> dict[str, Any]:
        return maybe_step(optimizer, params, opt_state, grads, finite)._asdict()

    run, opt_state = compiled_once(step), init_with(optimizer, params)
    for seed, finite in enumerate((GOOD, BAD, GOOD)):
        given = params, opt_state, grads_for(params, seed), finite
        found = run(*given)
        assert_close(found, step(*given), "compiled")
        params, opt_state = found["params"], found["opt_state"]


def donated_step_equals_pure_step(optimizer: Any, params: Any) -> None:
    """Three windows, the second not finite: the same bits, and every state given away refuses to be read."""
    make: Any = make_step  # one that takes donate
    pure, donated = make(linear_loss, optimizer), make(linear_loss, optimizer, donate=True)
    expected, state = (init_state(copied(params), optimizer, StaticScale(8.0)) for _ in range(2))
    for seed, factor in enumerate((1.0, math.inf, 1.0)):
        grads = mapped(lambda grad, factor=factor: grad * factor, grads_for(params, seed))
        window = [{"grads": grads, "weight": 1.0}, {"grads": grads_for(params, seed + 9), "weight": 2.0}]
        given = state
        state, metrics = donated(given, window)
        expected, expected_metrics = pure(expected, window)
        assert_same_bits(state, expected, "the donated state")
        assert_same_bits(metrics, expected_metrics, "the metrics of the donated step")
        if not used_up(given):
            raise AssertionError("state: found one that can be read after it was donated, expected RuntimeError.")


LAWS = (
    inputs_are_not_written_and_outputs_are_no_views_of_them,
    state_keeps_its_structure_shapes_and_dtypes,
    a_skipped_update_is_a_transaction,
    the_same_inputs_give_the_same_bits,
    a_missing_gradient_leaves_its_parameter_alone,
    half_precision_parameters_are_rounded_once,
    an_ensemble_under_vmap_is_its_members,
    donated_step_equals_pure_step,
)
COMPILED_LAWS = (it_compiles_to_one_graph,)

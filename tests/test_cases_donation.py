"""The second list of faults, tests named by their id: states that were given away, and the loop made by hand."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.engine import frozen, moved
from functional_amp.engine.loans import kept
from functional_amp.optim import fused, leafwise
from functional_amp.registry import with_fields
from functional_amp.testing import same_bits
from functional_amp.torch_private import torch_pytree
from functional_amp.tree import flatten, map_tensors

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

AOT: dict[str, Any] = {"backend": "aot_eager"}
HOW: dict[str, dict[str, Any]] = {
    "pure": {"donate": False},
    "donated": {"donate": True},
    "compiled": {"donate": False, "compile": AOT},
    "donated and compiled": {"donate": True, "compile": AOT},
}
EAGER = ("pure", "donated")


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


FAILURES = (OSError, KeyboardInterrupt, MemoryError)
Tree = dict[str, Tensor]


RAISED: list[type[BaseException]] = [OSError, KeyboardInterrupt, torch.OutOfMemoryError]


def failing(failure: type[BaseException]) -> Tensor:
    """A micro-batch at which the loss raises; of the kind of all others."""
    return torch.full((1, 1), float(RAISED.index(failure)))


def loss_of(params: Tree, x: Any, buffers: Tree) -> fa.Loss:
    if isinstance(x, Tensor) and x.shape[-1] == 1:  # what a loss raises, by the micro-batch
        raise RAISED[int(x[0, 0])]("in the loss")
    out = x @ params["w"] + params["b"]
    mean = torch.lerp(buffers["mean"], out.detach().mean(0), 0.5)
    return fa.Loss((out - mean).square().mean(), weight=float(len(x)), buffers={"mean": mean})


def batch(seed: int, n: int = 4) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed))


def optimizers() -> dict[str, fa.Optimizer]:
    return {
        "momentum": fa.sgd(0.1, momentum=0.9),
        "adamw": fa.adamw(0.1),
        "partition": fa.partition({"w": fa.adam(0.1), "b": fa.sgd(0.1, dampening=0.5, momentum=0.5)}, lambda p, _: p),
        "by hand": fa.Optimizer(
            lambda params: {"seen": torch.zeros(1)},
            lambda grads, state, params: (map_tensors(lambda g: -0.1 * g, grads), {"seen": state["seen"] + 1}),
        ),
    }


def started(optimizer: fa.Optimizer) -> fa.TrainState:
    params = {"w": torch.linspace(-1, 1, 6).view(3, 2), "b": torch.zeros(2)}
    return fa.init_state(params, optimizer, fa.DynamicScale(2.0**8), {"mean": torch.zeros(2)})


def ready(how: str, rule: str = "adamw", **options: Any) -> tuple[fa.Step, fa.TrainState]:
    """A step, and a state that it has returned."""
    optimizer = optimizers()[rule]
    step = fa.make_step(loss_of, optimizer, **{"max_norm": 0.5, **options}, **HOW[how])
    return step, step(started(optimizer), [batch(90), batch(91)])[0]


def loader(batches: list[Any], failure: type[BaseException], at: int) -> Iterator[Any]:
    """Micro-batches, and an exception in place of the one at a place (or of the end)."""
    for index in range(len(batches) + 1):
        if index == at:
            raise failure("in the loader")
        yield batches[index]


def is_as_it_was(state: fa.TrainState, before: fa.TrainState) -> None:
    assert same_bits(state, before) and (state.window is None) == (before.window is None)


def goes_on_as_if_nothing_had_been(step: fa.Step, state: fa.TrainState, before: fa.TrainState, how: str) -> None:
    """A retry gives what the window gives from a copy of the state, in one piece and in smaller ones."""
    pure = fa.make_step(loss_of, step.optimizer, max_norm=step.max_norm, **HOW["compiled" if "comp" in how else "pure"])
    expected, _ = pure(before, [batch(1), batch(2)])
    assert same_bits(step(state, [batch(1), batch(2)])[0], expected)


# G01: an exception anywhere in a window gives the state back


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("how", EAGER)
def test_G01_the_loader_raises_in_the_middle_of_a_donated_window(how, at, failure):
    for rule in optimizers():
        step, state = ready(how, rule)
        before = copy.deepcopy(state)
        with pytest.raises(failure):
            step(state, loader([batch(0), batch(1), batch(2)], failure, at))
        is_as_it_was(state, before)
        goes_on_as_if_nothing_had_been(step, state, before, how)


@pytest.mark.slow
def test_G01_the_loader_raises_in_the_middle_of_a_donated_window__compiled():
    how = "donated and compiled"
    step, state = ready(how)
    for at in range(4):
        before = copy.deepcopy(state)
        with pytest.raises(OSError, match="loader"):
            step(state, loader([batch(0), batch(1), batch(2)], OSError, at))
        is_as_it_was(state, before)
    goes_on_as_if_nothing_had_been(step, state, copy.deepcopy(state), how)


BAD: dict[str, Any] = {
    "a loss that raises": (failing(OSError), OSError),
    "Ctrl-C": (failing(KeyboardInterrupt), KeyboardInterrupt),
    "no memory": (failing(torch.OutOfMemoryError), torch.OutOfMemoryError),
    "a wrong shape": (torch.ones(4, 5), RuntimeError),
    "a wrong type": ("text", TypeError),
}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("how", EAGER)
def test_G01_the_loss_raises(how, bad, at):
    given, failure = BAD[bad]
    for rule in ("momentum", "partition"):
        step, state = ready(how, rule)
        before, batches = copy.deepcopy(state), [batch(0), batch(1), batch(2)]
        batches[at] = given
        with pytest.raises(failure):
            step(state, batches)
        is_as_it_was(state, before)
        with pytest.raises(failure):
            step.accumulate(state, given)
        is_as_it_was(state, before)
        goes_on_as_if_nothing_had_been(step, state, before, how)


@pytest.mark.slow
def test_G01_the_loss_raises__compiled():
    how = "donated and compiled"
    step, state = ready(how)
    for given, _ in BAD.values():
        for window in ([given], [batch(0), given], [batch(0), given, batch(1)]):
            before = copy.deepcopy(state)
            with pytest.raises((RuntimeError, TypeError, OSError, KeyboardInterrupt)):
                step(state, window)
            is_as_it_was(state, before)
    goes_on_as_if_nothing_had_been(step, state, copy.deepcopy(state), how)


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("how", EAGER)
def test_G01_a_scanned_window_raises(how, at):
    def loss_fn(params: Tree, x: Tensor, buffers: Tree) -> fa.Loss:
        if x[0, 0] == 7:
            raise MemoryError
        return loss_of(params, x, buffers)

    optimizer = fa.adamw(0.1)
    step = fa.make_step(loss_fn, optimizer, **HOW[how])
    state, _ = step(started(optimizer), [batch(9)])
    before, stacked = copy.deepcopy(state), torch.stack([batch(0), batch(1), batch(2)])
    bad = stacked.clone()
    bad[at, 0, 0] = 7
    for window, failure in ((bad, MemoryError), (torch.ones(3, 4, 5), RuntimeError), (torch.ones(0, 4, 3), ValueError)):
        with pytest.raises(failure):
            step.scan(state, window)
        is_as_it_was(state, before)
    assert same_bits(step.scan(state, stacked), fa.make_step(loss_fn, optimizer, donate=False).scan(before, stacked))


@pytest.mark.slow
def test_G01_a_scanned_window_raises__compiled():
    step, state = ready("donated and compiled")
    before = copy.deepcopy(state)
    for window in (torch.ones(3, 4, 5), torch.ones(0, 4, 3)):
        with pytest.raises((RuntimeError, ValueError)):
            step.scan(state, window)
        is_as_it_was(state, before)


def test_G01_a_window_without_memory_is_repeated_in_smaller_pieces():
    room = 4

    def loss_fn(params: Tree, x: Tensor, buffers: Tree) -> fa.Loss:
        if len(x) > room:
            raise torch.OutOfMemoryError("no room")
        return loss_of(params, x, buffers)

    optimizer = fa.adamw(0.1)
    step, pure = (fa.make_step(loss_fn, optimizer, donate=donate) for donate in (True, False))
    state, other = started(optimizer), started(optimizer)
    pieces = [batch(0), batch(1), batch(2)]
    with pytest.raises(torch.OutOfMemoryError):
        step(state, [batch(3), torch.cat(pieces)])
    assert same_bits(step(state, [batch(3), *pieces]), pure(other, [batch(3), *pieces]))


@pytest.mark.parametrize(
    ("how", "rest"),
    [
        ("donated", [failing(OSError)]),
        ("donated", [batch(0), failing(OSError)]),
        ("donated", []),
        slow("donated and compiled", [batch(0), failing(OSError)]),
    ],
)
def test_G01_an_open_window_that_was_handed_in_and_added_to_is_lost_and_says_so(how, rest):
    step, state = ready(how)
    before = copy.deepcopy(state)
    opened = step.accumulate(state, batch(7))
    with pytest.raises((OSError, RuntimeError, ValueError)):
        step(opened, rest)
    if len(rest) < 2:  # nothing had been added
        assert opened.window is not None
        assert same_bits(dataclasses.replace(opened, window=None), before)
    else:
        with pytest.raises(RuntimeError, match=r"open window, which is lost.*dataclasses.replace\(state, window=None"):
            _ = opened.window
        assert not hasattr(opened, "window") and "params" in repr(opened)
        for name in ("params", "opt_state", "scaler", "buffers", "applied"):
            assert same_bits(getattr(opened, name), getattr(before, name))
        for save in (pickle.dumps, copy.copy, copy.deepcopy, flatten, step.update):
            with pytest.raises(RuntimeError, match="window, which is lost"):
                save(opened)
    goes_on_as_if_nothing_had_been(step, dataclasses.replace(opened, window=None), before, how)


def failing_on(leaf: str, transact: Callable[..., Any]) -> Callable[..., Any]:
    def run(grads: Tree, opt_state: Any, params: Tree, *rest: Any) -> Any:
        if params[leaf] is not None:
            raise OSError("in the optimizer")
        return transact(grads, opt_state, params, *rest)

    return run


@pytest.mark.parametrize(("bad", "written"), [("a", False), ("z", True)])
def test_G01_an_optimizer_that_raises_between_two_leaves_loses_what_it_had_begun_to_write(bad, written):
    good = fa.adamw(0.1)
    failing = good._replace(transact=failing_on(bad, good.transact))  # pyright: ignore[reportArgumentType]
    optimizer = fa.partition({"a": failing, "z": failing}, lambda path, leaf: path)
    step = fa.make_step(lambda p, x: (p["a"] * p["z"] * x).sum(), optimizer, donate=True)
    state = fa.init_state({"a": torch.ones(2), "z": torch.ones(2)}, optimizer)
    before = copy.deepcopy(state)
    with pytest.raises(OSError, match="optimizer"):
        step(state, [torch.ones(2)])
    if not written:
        is_as_it_was(state, before)
        return
    for use in (lambda: state.params, lambda: state.window, lambda: pickle.dumps(state), lambda: copy.copy(state)):
        with pytest.raises(RuntimeError, match=r"is lost.*begun to write.*checkpoint"):
            use()
    assert "lost" in repr(state) and not hasattr(state, "params")


def test_G01_an_exception_while_the_buffers_are_put_loses_the_state_and_says_so(monkeypatch):
    step, state = ready("donated")
    monkeypatch.setattr("functional_amp.engine.lease.write_into", lambda *_: _raise(MemoryError))
    with pytest.raises(MemoryError):
        step(state, [batch(0)])
    with pytest.raises(RuntimeError, match="is lost"):
        _ = state.params


FAILS: list[str] = []
"""Where the operator below raises, at run time: "forward" or "backward"."""


def _fallible(where: str) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        if where in FAILS:
            raise torch.OutOfMemoryError(f"in the {where}")
        return x.clone()

    operator = torch.library.custom_op(f"functional_amp_tests::{where}", run, mutates_args=())
    operator.register_fake(torch.empty_like)  # pyright: ignore[reportFunctionMemberAccess]
    return operator


FORWARD, BACKWARD = _fallible("forward"), _fallible("backward")


class Fallible(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return FORWARD(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return BACKWARD(grads[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does it
@pytest.mark.parametrize(
    ("rule", "where", "backend"),
    [
        *itertools.product(["adamw", "by hand"], ["forward", "backward"], ["aot_eager"]),
        ("adamw", "backward", "inductor"),
    ],
)
def test_G01_a_graph_that_runs_out_of_memory_before_its_update_gives_the_state_back(rule, where, backend):
    def loss_fn(params: Tree, x: Tensor, buffers: Tree) -> fa.Loss:
        return loss_of({**params, "w": Fallible.apply(params["w"])}, x, buffers)

    optimizer = optimizers()[rule]
    step = fa.make_step(loss_fn, optimizer, max_norm=0.5, donate=True, compile={"backend": backend})
    state, _ = step(started(optimizer), [batch(90)])
    for window in ([batch(1)], [batch(1), batch(2)], [batch(1), batch(2), batch(3)]):
        before = copy.deepcopy(state)
        pure, _ = fa.make_step(loss_of, optimizer, max_norm=0.5)(before, window)
        lengths = range(len(window)) if len(window) < 3 else [1]  # after how many micro-batches it fails
        for at in lengths:

            def failing_at(at: int = at, window: list[Tensor] = window) -> Iterator[Tensor]:
                for index, x in enumerate(window):
                    # A step looks one ahead: the micro-batch that is asked for next runs after this line.
                    FAILS[:] = [where] if index == at + 1 else []
                    yield x
                FAILS[:] = [where] if at == len(window) - 1 else FAILS

            try:
                with pytest.raises(torch.OutOfMemoryError, match=where):
                    step(state, failing_at())
            finally:
                FAILS.clear()
            is_as_it_was(state, before)
        state, _ = step(state, window)
        torch.testing.assert_close(state.params, pure.params)


def _raise(failure: type[BaseException]) -> NoReturn:
    raise failure


def lines_of(action: Callable[[], Any], stop_at: int = -1, within: tuple[str, ...] = ("",)) -> int:
    """Runs an action with a KeyboardInterrupt before the n-th line of the package, or of some files of it.

    Returns:
        How many lines it ran.
    """
    package = tuple(str(Path(fa.__file__).parent / part) for part in within)
    private: Any = torch._C
    count, enabled, modes = 0, torch.is_grad_enabled(), private._get_torch_function_state()

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(package) or frame.f_code.co_name == "_drop":
            return None  # what a weak reference calls can not be interrupted: Python swallows it
        if event == "line":
            count += 1
            if count == stop_at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        assert stop_at >= 0
    finally:
        sys.settrace(None)
        # A trace may raise between the end of a with block and its exit, where Python lets no signal in.
        torch.set_grad_enabled(enabled)
        private._set_torch_function_state(modes)
    return count


def interrupted(stride: int) -> tuple[int, int]:
    """Interrupts a donated window at every so many lines: how often the state came back, and was lost."""
    back, lost = 0, 0
    step, state = ready("donated")
    window = [batch(0), batch(1)]
    for n in range(1, lines_of(lambda: step(copy.deepcopy(state), window)), stride):
        given = copy.deepcopy(state)
        if lines_of(lambda given=given: step(given, window), n) < n:  # it came to its end: the first call ran more
            break
        if hasattr(given, "params"):
            is_as_it_was(given, state)
            back += 1
        else:
            with pytest.raises(RuntimeError, match=r"is lost.*begun to write"):
                _ = given.params
            lost += 1
        assert lost == 0 or not hasattr(given, "params")  # all that comes after the first write
    return back, lost


def test_G01_ctrl_c_at_any_line_gives_the_state_back_or_says_that_it_is_lost():
    back, lost = interrupted(stride=97)
    assert back > lost > 0


@pytest.mark.parametrize(
    ("within", "stride"),
    [
        (("engine/loans.py",), 1),
        (("engine/frozen.py",), 1),
        (("engine/moved.py", "innermost.py"), 1),
        (("mode.py",), 5),
    ],
    ids=["loans", "frozen", "moved", "mode"],
)
def test_G01_ctrl_c_at_any_line_leaves_nothing_open_in_its_thread(within, stride):
    step, state = ready("donated")
    window, predicate = [batch(0)], lambda path, leaf: False
    history = fa.ScaledGrads(torch.ones(2, requires_grad=True), 8.0)
    lines = lines_of(lambda: step(copy.deepcopy(state), window), within=within)
    assert lines > 4 * stride
    for n in range(1, lines, stride):
        lines_of(lambda: step(copy.deepcopy(state), window), n, within)
        assert not kept(lambda: None), n  # nobody would give it back
        assert not frozen.hidden(predicate), n
        assert moved._names.now() is None, n
        fa.unscale(history)  # refused inside a loss that the engine records


# G02, G03: what reads a state that was given away


SAVES: dict[str, Callable[[Any], Any]] = {
    "torch.save": lambda state: torch.save(state, io.BytesIO()),
    "torch.save in a dict": lambda state: torch.save({"state": [state]}, io.BytesIO()),
    "pickle": pickle.dumps,
    "an old pickle": lambda state: pickle.dumps(state, protocol=0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "dataclasses.asdict": dataclasses.asdict,
    "dataclasses.replace": dataclasses.replace,
    "fa.state_dict": fa.state_dict,
    "optree": flatten,
    "torch's pytree": torch_pytree.tree_leaves,
    "fields by vars": lambda state: with_fields(state, window=None).params,
}


def is_refused(save: Callable[[Any], Any], given: fa.TrainState, kept: fa.TrainState) -> None:
    with pytest.raises(RuntimeError, match=r"donated.*Go on with the state that the step returned"):
        save(given)
    save(kept)


@pytest.mark.parametrize("save", SAVES)
def test_G02_a_state_that_was_given_away_is_saved(save):
    step, given = ready("donated")
    is_refused(SAVES[save], given, step.accumulate(given, batch(0)))
    step, given = ready("donated")
    is_refused(SAVES[save], given, step(given, [batch(0)])[0])


def test_G02_a_state_that_was_given_away_is_saved__compiled():
    given = started(optimizers()["momentum"])
    kept = fa.make_step(loss_of, optimizers()["momentum"], **HOW["donated and compiled"]).accumulate(given, batch(0))
    for save in SAVES.values():
        is_refused(save, given, kept)


def test_G03_printing_hasattr_and_repr_of_a_given_away_state(capsys):
    step, given = ready("donated")
    state, _ = step(given, [batch(0)])
    print(given)
    shown = [repr(given), str(given), f"{given}", f"{given!r:>1}", capsys.readouterr().out.strip()]
    assert len(set(shown)) == 1 and len(shown[0]) < 300
    assert "given away" in shown[0] and "the state that the step returned" in shown[0]
    for field in dataclasses.fields(fa.TrainState):
        assert not hasattr(given, field.name) and hasattr(state, field.name)
        assert getattr(given, field.name, None) is None
    assert given == given and isinstance(hash(given), int) and "params" in repr(state)


# G04: leaves that change hands in the last state


def _replaced(tree: Any, name: str) -> None:
    tree[name] = tree[name].clone() + 1


CHANGES: dict[str, Callable[[fa.TrainState], Any]] = {
    "one of the params for another": lambda s: s.params.update(b=s.params["a"]),
    "params swapped": lambda s: s.params.update(a=s.params["b"], b=s.params["a"]),
    "a param replaced": lambda s: _replaced(s.params, "a"),
    "a param replaced by a view": lambda s: s.params.update(a=s.params["a"].view(-1).view(2, 2)),
    "a param that lies on another": lambda s: s.params.update(b=s.params["a"].t()),
    "a momentum for another": lambda s: s.opt_state[1].update(b=s.opt_state[1]["a"]),
    "a momentum replaced": lambda s: _replaced(s.opt_state[1], "b"),
    "a buffer replaced": lambda s: _replaced(s.buffers, "a"),
    "one of the buffers for another": lambda s: s.buffers.update(b=s.buffers["a"]),
    "a buffer that is a param": lambda s: s.buffers.update(a=s.params["a"]),
    "data elsewhere": lambda s: setattr(s.params["a"], "data", s.params["a"] + 1),
    "data on another's": lambda s: setattr(s.params["a"], "data", s.params["b"].data),
    "data transposed": lambda s: setattr(s.params["a"], "data", s.params["a"].data.t()),
    "data expanded": lambda s: setattr(s.params["a"], "data", s.params["a"].data[:1].expand(2, 2)),
    "transposed in place": lambda s: s.params["a"].transpose_(0, 1),
    "set in place": lambda s: s.params["a"].set_(s.params["b"]),
    "a momentum's data elsewhere": lambda s: setattr(s.opt_state[1]["a"], "data", s.opt_state[1]["a"] + 1),
    "a momentum's data transposed": lambda s: setattr(s.opt_state[1]["a"], "data", s.opt_state[1]["a"].data.t()),
    "a buffer's data on a param's": lambda s: setattr(s.buffers["a"], "data", s.params["a"].data),
    "numbers changed in place": lambda s: s.params["a"].mul_(2),
    "a param that requires grad": lambda s: s.params["a"].requires_grad_(),
}


def two_leaves(params: Tree, x: Tensor, buffers: Tree) -> fa.Loss:
    loss = (params["a"] * x).square().sum() + (params["b"] * x * buffers["a"]).sum()
    return fa.Loss(loss, buffers=map_tensors(lambda leaf: leaf * 0.5 + x.mean(), buffers))


def values(state: fa.TrainState) -> list[Tensor]:
    return [
        leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in flatten(state).leaves if leaf is not None
    ]


def pair_of_steps(how: str) -> list[fa.Step]:
    pure = {"donate": False, **({"compile": AOT} if "comp" in how else {})}
    optimizer = fa.sgd(0.1, momentum=0.9)
    return [fa.make_step(two_leaves, optimizer, backend="autograd", **options) for options in (pure, HOW[how])]


def check_replaced(steps: list[fa.Step], change: str) -> None:
    x, ends = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), []
    for step in steps:
        params = {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([[5.0, 6.0], [7.0, 8.0]])}
        buffers = {"a": torch.ones(2, 2), "b": torch.ones(2, 2)}
        state, _ = step(fa.init_state(params, step.optimizer, fa.StaticScale(4.0), buffers), [x])
        state, _ = step(state, [x])
        CHANGES[change](state)
        state, _ = step(state, [x, x])
        ends.append(step(state, [x])[0])
    pure, donated = ends
    assert same_bits(values(donated), values(pure)), change
    assert len({leaf.data_ptr() for leaf in flatten((donated.params, donated.buffers)).leaves}) == 4, change


@pytest.mark.parametrize("change", CHANGES)
def test_G04_a_leaf_replaced_by_hand_in_the_last_state(change):
    check_replaced(pair_of_steps("donated"), change)


@pytest.mark.slow
def test_G04_a_leaf_replaced_by_hand_in_the_last_state__compiled():
    steps = pair_of_steps("donated and compiled")
    with torch._dynamo.config.patch(recompile_limit=64):  # other strides are other graphs
        for change in list(CHANGES)[::3]:  # with the same graphs where they fit: each takes seconds
            check_replaced(steps, change)


def test_G04_a_leaf_replaced_by_hand_in_the_last_state__as_the_list_says():
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x: p["a"] * x + p["b"] * 2 * x, optimizer, donate=True)
    state, _ = step(fa.init_state({"a": torch.tensor(1.0), "b": torch.tensor(5.0)}, optimizer), [torch.tensor(1.0)])
    state.params["b"] = state.params["a"]
    state, _ = step(state, [torch.tensor(1.0)])
    torch.testing.assert_close(state.params, {"a": torch.tensor(0.8), "b": torch.tensor(0.7)})


@pytest.mark.parametrize("what", ["grads.tree", "params"])
@pytest.mark.parametrize("change", ["elsewhere", "transposed", "replaced"])
def test_G04_a_leaf_of_the_open_window_is_changed(change, what):
    optimizer, x = fa.sgd(0.1), torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    ends = []
    for donate in (False, True):
        step = fa.make_step(
            lambda p, x: (p["a"] * x.to(p["a"].dtype)).square().sum().float(),
            optimizer,
            compute_dtype=torch.bfloat16,
            backend="autograd",
            donate=donate,
        )
        state = fa.init_state({"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}, optimizer, fa.StaticScale(4.0))
        state = step.accumulate(step.accumulate(step(state, [x])[0], x), x)
        tree: Any = state.window.grads.tree if what == "grads.tree" else state.window.params  # pyright: ignore
        if change == "replaced":
            tree["a"] = tree["a"] * 2
        else:
            tree["a"].data = tree["a"].data.t() if change == "transposed" else tree["a"].data * 2
        ends.append(values(step.update(step.accumulate(state, x))[0]))
    assert same_bits(*ends)


# G05: several donated steps at once


@pytest.mark.parametrize(("how", "itself"), [("donated", False), ("donated", True), ("donated and compiled", False)])
def test_G05_another_donating_step_writes_while_a_loss_raises(how, itself):
    def loss_fn(params: Tensor, x: Tensor) -> Tensor:
        if x.dim() == 1:  # a micro-batch of the outer step
            for _ in range(2):
                with torch.no_grad():
                    others[0], _ = (step if itself else inner)(others[0], [torch.ones(1, 3)])
            if x[0] == 7:
                raise OSError("after the inner step has written")
        return (params * x).sum()

    optimizer = fa.adamw(0.1)
    inner = fa.make_step(lambda p, x: (p * x).sum(), optimizer, **HOW[how])
    step = fa.make_step(loss_fn, optimizer, donate=True)
    others = [fa.init_state(torch.ones(3), optimizer)]
    state, _ = step(fa.init_state(torch.ones(3), optimizer), [torch.ones(3)])
    for window in ([torch.full((3,), 7.0)], [torch.ones(3), torch.full((3,), 7.0)]):
        before = copy.deepcopy(state)
        with pytest.raises(OSError, match="inner step"):
            step(state, window)
        is_as_it_was(state, before)
    assert same_bits(step(state, [torch.ones(3)])[0], step(before, [torch.ones(3)])[0])
    assert others[0].applied.item() == 12


def test_G05_steps_in_threads_beside_each_other_lose_nothing_to_each_other():
    optimizer = fa.adamw(0.1)
    shared = fa.make_step(loss_of, optimizer, max_norm=0.5, donate=True)
    pure = fa.make_step(loss_of, optimizer, max_norm=0.5, donate=False, backend="autograd")
    expected = started(optimizer)
    for index in range(12):
        expected, _ = pure(expected, [batch(index), batch(index + 1)])
    ends: dict[int, Any] = {}

    def train(name: int, step: fa.Step) -> None:
        state, rounds = started(optimizer), 0
        for index in range(12):
            before = copy.deepcopy(state)
            with pytest.raises(OSError, match="loss"):
                step(state, [batch(0), failing(OSError)])
            assert same_bits(state, before)
            state, _ = step(state, [batch(index), batch(index + 1)])
            rounds += 1
        ends[name] = (rounds, state)

    own = [fa.make_step(loss_of, optimizer, max_norm=0.5, donate=True) for _ in range(2)]
    threads = [threading.Thread(target=train, args=args) for args in enumerate([shared, shared, *own])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == [0, 1, 2, 3]
    assert all(rounds == 12 and same_bits(state, expected) for rounds, state in ends.values())


# G06: plans


@pytest.fixture
def plans(monkeypatch):
    """Each plan that is made: whether it lasts."""
    made: list[bool] = []

    def plan_of(*args: Any, lasting: bool) -> Any:
        made.append(lasting)
        return fused.plan_of(*args, lasting=lasting)

    monkeypatch.setattr(leafwise, "plan_of", plan_of)
    return made


@pytest.mark.parametrize("lengths", [[1], [2], [3, 1, 2]])
def test_G06_one_optimizer_under_two_labels(plans, lengths):
    each = fa.adamw(0.1)
    optimizer = fa.partition({"a": each, "b": each}, lambda path, leaf: "a" if path == "w" else "b")
    step = fa.make_step(loss_of, optimizer, max_norm=0.5, donate=True)
    state = started(optimizer)
    counts = []
    for index in range(10):
        window = [batch(index + k) for k in range(lengths[index % len(lengths)])]
        state, _ = step(state, [*window[:-1], window[-1] * (torch.inf if index == 5 else 1)])
        counts.append(len(plans))
    assert counts[0] == counts[-1] == 2 and all(plans)
    assert state.applied.item() == 9


@pytest.mark.parametrize("halves", [False, True])
def test_G06_no_plan_is_made_anew_for_any_optimizer_that_has_one(plans, halves):
    for rule in ("momentum", "adamw", "partition"):
        step, state = ready("donated", rule)
        del plans[:]
        for index in range(4):
            if halves:
                state, _ = step.update(step.accumulate(step.accumulate(state, batch(index)), batch(5)))
            else:
                state, _ = step(state, [batch(index), batch(5)])
        assert plans == []


def test_G06_the_pure_path_makes_no_plan_that_could_be_used_again(plans):
    optimizer = fa.adamw(0.1)
    params, grads = {"w": torch.ones(2)}, {"w": torch.ones(2)}
    opt_state = optimizer.init(params)
    for _ in range(10):
        params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, torch.tensor(True))
    step, state = ready("pure")
    step(state, [batch(0)])
    assert plans and not any(plans)


def test_G06_a_step_keeps_one_plan_for_each_label_and_drops_it_with_the_state(plans):
    step, state = ready("donated", "partition")
    assert plans == [True, True]
    other = started(optimizers()["partition"])
    for index in range(3):  # two states in turn: a lease is for the last one
        state, _ = step(state, [batch(index)])
        other, _ = step(other, [batch(index)])
    assert all(plans)


# G07: an optimizer with another update or step


@pytest.mark.parametrize(
    ("how", "scaled"), [*[(h, s) for h in EAGER for s in (False, True)], slow("donated and compiled", True)]
)
def test_G07_optimizer_replace_update(how, scaled):
    def half(grads: Any, state: Any, params: Any) -> Any:
        return map_tensors(lambda g: -0.5 * g.sign(), grads), state

    for base in (fa.sgd(0.1), fa.adamw(0.1), fa.sgd(0.1, momentum=0.9, dampening=0.1)):
        optimizer = base._replace(update=half)
        params, good = {"w": torch.tensor([1.0, -2.0])}, torch.tensor(True)
        grads = {"w": torch.tensor([3.0, -4.0])}
        expected = {"w": torch.tensor([0.5, -1.5])}
        given = fa.ScaledGrads(grads, 4.0, 2.0) if scaled else grads
        assert same_bits(fa.maybe_step(optimizer, params, optimizer.init(params), given, good).params, expected)
        split = fa.partition({"all": optimizer}, lambda path, leaf: "all")
        for each in (optimizer, split):
            step = fa.make_step(lambda p, x: (p["w"] * x).sum(), each, **HOW[how])
            state, _ = step(fa.init_state(params, each), [grads["w"]])
            assert same_bits(state.params, expected)


@pytest.mark.parametrize("how", EAGER)
def test_G07_optimizer_replace_step(how):
    def quarter(grads: Any, state: Any, params: Any) -> Any:
        return map_tensors(lambda p, g: p - 0.25 * g.sign(), params, grads), state

    params, x = {"w": torch.tensor([1.0, -2.0])}, torch.tensor([3.0, -4.0])
    for base in (fa.sgd(0.1), fa.adamw(0.1), fa.partition({"all": fa.adamw(0.1)}, lambda path, leaf: "all")):
        optimizer = base._replace(step=quarter)
        split = fa.partition({"all": optimizer}, lambda path, leaf: "all")
        for each in (
            optimizer,
            split,
            getattr(copy, "replace", lambda old, step: old._replace(step=step))(base, step=quarter),
        ):
            step = fa.make_step(lambda p, x: (p["w"] * x).sum(), each, **HOW[how])
            state, _ = step(fa.init_state(params, each), [x])
            assert state.params["w"].tolist() == [0.75, -1.75]
            found = fa.maybe_step(each, params, each.init(params), {"w": x}, torch.tensor(True))
            assert found.params["w"].tolist() == [0.75, -1.75]


def test_G07_what_replaces_the_transaction_is_the_transaction():
    base = fa.adamw(0.1)
    optimizer = base._replace(
        transact=lambda grads, state, params, divisor, applied, storage: ({"w": grads["w"]}, state)
    )
    params = {"w": torch.ones(2)}
    found = fa.maybe_step(optimizer, params, base.init(params), {"w": torch.zeros(2)}, torch.tensor(True))
    assert found.params["w"].tolist() == [0, 0] and optimizer.update is base.update


# L05: the loop made by hand


def by_hand(
    optimizer: fa.Optimizer, loss_fn: Any, max_norm: float | None, params: Any, windows: list[list[Any]], backend: Any
) -> Any:
    """README's loop, from one window to the next."""
    opt_state, scaler, norms = optimizer.init(params), fa.DynamicScale(2.0**10), []
    for window in windows:
        total = None
        for micro_batch in window:
            grads, _, _ = fa.scale_backward(loss_fn, scaler, params, micro_batch, backend=backend)
            total = fa.accumulate(total, grads)
        assert total is not None
        grads, norm = fa.clip(total, max_norm)
        finite = fa.all_finite(grads, norm=norm)
        params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, finite)
        scaler = fa.update_scale(scaler, finite)
        norms.append(norm)
    return params, opt_state, scaler, norms


def weighted_loss(params: Tree, given: tuple[Tensor, Any]) -> fa.Loss:
    x, weight = given
    return fa.Loss((torch.tanh(x @ params["w"]) + params["b"]).square().mean(), weight)


WEIGHTS: dict[str, list[list[float]]] = {
    "one": [[1], [1, 1], [1, 1, 1]],
    "tokens": [[3], [7, 11], [3, 7, 11]],
    "a window without weight": [[3, 7], [0], [0, 0], [11]],
    "a micro-batch without weight": [[3, 0], [0, 7], [11]],
}


@pytest.mark.parametrize("how", EAGER)
@pytest.mark.parametrize("max_norm", [None, 0.1, 1e6])
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("rule", optimizers())
def test_L05_the_hand_made_loop_and_a_window_without_weight(rule, weights, max_norm, how):
    optimizer, params = optimizers()[rule], {"w": torch.linspace(-1, 1, 6).view(3, 2), "b": torch.zeros(2)}
    windows: list[Any] = [
        [(batch(10 * i + k), weight) for k, weight in enumerate(window)] for i, window in enumerate(WEIGHTS[weights])
    ]
    windows.insert(1, [(batch(50), 2.0), (batch(51) * torch.nan, 3.0)])
    found = by_hand(optimizer, weighted_loss, max_norm, params, windows, "autograd")
    step = fa.make_step(weighted_loss, optimizer, max_norm=max_norm, backend="autograd", **HOW[how])
    state, norms = fa.init_state(params, optimizer, fa.DynamicScale(2.0**10)), []
    for window in windows:
        state, metrics = step(state, window)
        norms.append(metrics.grad_norm)
    assert same_bits(found, (state.params, state.opt_state, state.scaler, norms))
    without = sum(not any(window) for window in WEIGHTS[weights])
    assert state.applied.item() == len(WEIGHTS[weights]) - without and state.skipped.item() == 1 + without


def test_L05_the_hand_made_loop_and_a_window_without_weight__as_the_list_says():
    optimizer = fa.adamw(0.1, weight_decay=0.5)
    windows = [[(torch.ones(1), 1.0)], [(torch.ones(1), 0.0)]]

    def loss_fn(params: Tensor, given: Any) -> fa.Loss:
        return fa.Loss((params * given[0]).sum(), given[1])

    params, opt_state, _, _ = by_hand(optimizer, loss_fn, None, torch.ones(1), windows, "func")
    torch.testing.assert_close(params, torch.tensor([0.85]))
    assert opt_state.step.item() == 1

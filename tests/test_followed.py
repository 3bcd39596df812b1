"""The table of docs/followed.md: each line is run, and the page is what the lines give.

`python -m tests.test_followed` writes it.
"""

from __future__ import annotations

import functools
import queue
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import functional_amp as fa
from tests import test_border_kept as border
from tests import test_cases_modules as cases

PAGE = Path(__file__).parent.parent / "docs" / "followed.md"
FOLLOWED, AT_ONCE, AT_THE_CALL = "followed", "refused by `from_module`", "refused by the first call"


class Line(NamedTuple):
    """What a module has or does, what becomes of it, and what to do instead."""

    what: str
    outcome: str
    remedy: str
    make: Callable[[], nn.Module]
    rows: Any = cases.drawn(5, 3)


HELD = functools.partial(cases.holding, "kept")
_TIED = functools.partial(cases.AutoEncoder, cases._by_the_parameter)
_TWO = functools.partial(cases.AutoEncoder, cases._by_data)
_COUNTING = functools.partial(cases.CountingData, cases._data_add)
IDS = torch.tensor([[0, 1], [2, 3]])

LINES = [
    Line("tied parameters: one tensor at several names", FOLLOWED, "", _TIED),
    Line("parameters and modules in lists and dicts", FOLLOWED, "", cases.InDicts),
    Line("parameters and modules as attributes of other objects", FOLLOWED, "", cases.InAnObject),
    Line("modules in tuples", FOLLOWED, "", cases.InATuple),
    Line("bound methods as attributes", FOLLOWED, "", cases.ScalarMethod, torch.tensor(1.0)),
    Line("methods of containers, which look something up", FOLLOWED, "shared with the module", lambda: HELD({}.get)),
    Line("`functools.partial` over the module", FOLLOWED, "", cases.ScalarPartial, torch.tensor(1.0)),
    Line("recurrent layers", FOLLOWED, "", cases.Recurrent),
    Line("recurrent layers with computed weights", FOLLOWED, "", lambda: _pruned_gru()),
    Line("the old `weight_norm`", FOLLOWED, "", cases.old_weight_norm),
    Line("the old `spectral_norm` (it writes buffers)", FOLLOWED, "", cases.old_spectral_norm),
    Line("`torch.nn.utils.prune`", FOLLOWED, "", cases.pruned),
    Line("parametrizations", FOLLOWED, "", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))),
    Line("objects that the module and a hook of its own hold", FOLLOWED, "shared with the module", lambda: _flagged()),
    Line("locks and script functions", FOLLOWED, "shared with the module", cases.Locked),
    Line("buffers written to, in place or anew, `.data` included", FOLLOWED, "", _COUNTING),
    Line("frozen parameters that the forward writes to", FOLLOWED, "", lambda: cases.Bounded(frozen=True), IDS),
    Line("attributes that are written before they are read", FOLLOWED, "", cases.Attention),
    Line("checkpoints that are not reentrant, with the autograd backend", FOLLOWED, "", cases.Checkpointed),
    Line("closures over the module or its parameters", AT_ONCE, "a method, or a partial", cases.ScalarClosure),
    Line("hooks that close over the module", AT_ONCE, "a partial over a list of layers", cases.forward_hook),
    Line("default arguments that are the module", AT_ONCE, "a partial", cases.default_argument),
    Line("weak references and weak proxies to it", AT_ONCE, "hold it in a list", cases.weak_reference),
    Line("buffers that were computed from parameters", AT_ONCE, "register its `.detach()`", lambda: _computed()),
    Line("gradient hooks on parameters", AT_ONCE, "the rule in the loss function", lambda: _hooked()),
    Line("two parameters over one memory", AT_ONCE, "one parameter at both names", _TWO),
    Line("queues and context variables", AT_ONCE, "a list and a buffer", lambda: HELD(queue.SimpleQueue())),
    Line("iterators, Python's generators, `torch.Generator`", AT_ONCE, "a list and a buffer", lambda: HELD(iter([1]))),
    Line("generators of `random` and of numpy", AT_ONCE, "torch's own generator", lambda: HELD(random.Random(0))),
    Line("arrays over the memory of a parameter", AT_ONCE, "make them in the forward", lambda: _array()),
    Line("tables that parameters are the keys of, and sets of them", AT_ONCE, "names", lambda: _table()),
    Line("tables of `id(layer)`", AT_ONCE, "the layer or its name", lambda: _table(by_id=True)),
    Line("classes whose copies hold something else", AT_ONCE, "remove `__deepcopy__`", lambda: _forgetful()),
    Line("classes of parameters that `detach()` does not keep", AT_ONCE, "an `nn.Parameter`", lambda: _of_a_class()),
    Line("objects that can not be copied", AT_ONCE, "give them a `__deepcopy__`", lambda: HELD(cases.Refusing())),
    Line("`DataParallel`, `DistributedDataParallel`", AT_ONCE, "its `.module`", lambda: nn.DataParallel(cases.Net())),
    Line("`ScriptModule`", AT_ONCE, "the module that was scripted", lambda: cases.scripted(nn.Linear(3, 4))),
    Line("FSDP modules", AT_ONCE, "the module before; shard the params", lambda: _sharded()),
    Line("`torch.compile(module)`", AT_ONCE, "its `._orig_mod`; compile the step", lambda: _compiled()),
    Line("parameters in tuples, where they are read", AT_THE_CALL, "a list", lambda: _in_a_tuple()),
    Line("views of parameters made outside of the forward", AT_THE_CALL, "take them in the forward", lambda: _viewed()),
    Line("globals that are the module", AT_THE_CALL, "an argument", cases.ReadsAGlobal),
    Line("writes to parameters (`max_norm`, constraints)", AT_THE_CALL, "in the loss function", cases.Bounded, IDS),
    Line("counters and other attributes that are kept", AT_THE_CALL, "a buffer", cases.Counter),
    Line("caches that the first forward fills", AT_THE_CALL, "run the module once before", cases.Caching),
    Line("buffers and modules made in the forward", AT_THE_CALL, "make them in `__init__`", cases.MadeAtFirst),
    Line("numbers kept in arrays, slots, keys of dicts", AT_THE_CALL, "a buffer", lambda: _array_that_counts()),
    Line("lists that grow", AT_THE_CALL, "return it; or `scratch=`", cases.Logging),
    Line("tied places of which one is assigned anew", AT_THE_CALL, "write in place", lambda: _parting()),
    Line("buffers deleted or set to None", AT_THE_CALL, "zeros, and a flag", lambda: _going()),
    Line("hooks added or removed in the forward", AT_THE_CALL, "add them before", lambda: _hooking()),
    Line("tensors written to that are no buffers", AT_THE_CALL, "register them", cases.Constant),
    Line("variables of closures that count", AT_THE_CALL, "a buffer", cases.CountingInAClosure),
    Line("reentrant checkpoints", AT_THE_CALL, "`use_reentrant=False`", lambda: cases.Checkpointed(use_reentrant=True)),
]  # fmt: skip


def _array() -> nn.Module:
    module = cases.Net()
    module.f = module.l.weight.detach().numpy()
    return module


def _table(*, by_id: bool = False) -> nn.Module:
    module = cases.Net()
    module.f = {id(module.l): 1} if by_id else {module.l.weight}
    return module


def _parting() -> nn.Module:
    return border.TwoPlaces(border._anew)


def _going() -> nn.Module:
    return border.Going(border._to_none)


def _hooking() -> nn.Module:
    return border.Hooking(border._removing, rows=0)


def _of_a_class() -> nn.Module:
    module = cases.Net()
    module.l.bias = border.Marked(torch.zeros(4))
    return module


def _forgetful() -> nn.Module:
    class Forgetful(cases.Net):
        def __getstate__(self) -> Any:
            return {**self.__dict__, "f": None}

    module = Forgetful()
    module.f = 1
    return module


def _array_that_counts() -> nn.Module:
    class Counting(cases.Net):
        def forward(self, x: Any) -> Any:
            self.f[0] += 1
            return super().forward(x)

    module = Counting()
    module.f = bytearray(1)
    return module


def _flagged() -> nn.Module:
    module, flag = cases.Net(), {"scale": 2.0}
    module.f = flag

    def scaled(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        return out * flag["scale"]

    module.l.register_forward_hook(scaled)
    return module


def _pruned_gru() -> nn.Module:
    class Pruned(cases.Net):
        def __init__(self):
            super().__init__()
            self.r: Any = prune.l1_unstructured(nn.GRU(3, 3), "weight_hh_l0", 0.5)

        def forward(self, x: Any) -> Any:
            return super().forward(self.r(x)[0])

    return Pruned()


def _hooked() -> nn.Module:
    module = cases.Net()
    module.l.weight.register_hook(lambda grad: grad)
    return module


def _computed() -> nn.Module:
    module = cases.Net()
    module.register_buffer("b", module.l.weight + 1)
    return module


def _compiled() -> Any:
    return torch.compile(cases.Net(), backend="eager")


def _sharded() -> nn.Module:
    module = cases.Net()
    from torch.distributed.fsdp import FSDPModule

    module.__class__ = type("FSDPNet", (FSDPModule, cases.Net), {})  # what fully_shard does, without ranks
    return module


def _in_a_tuple() -> nn.Module:
    class Fixed(cases.Net):
        def __init__(self):
            super().__init__()
            self.kept = (self.l.weight,)

        def forward(self, x: Any) -> Any:
            return x @ self.kept[0].T

    return Fixed()


def _viewed() -> nn.Module:
    class Viewed(cases.Net):
        def __init__(self):
            super().__init__()
            self.view = self.l.weight.data[:2]

        def forward(self, x: Any) -> Any:
            return x @ self.view.T

    return Viewed()


def outcome(line: Line) -> str:
    """What becomes of a module."""
    try:
        apply, params, buffers = fa.from_module(cases.built(line.make))
    except TypeError as error:
        assert "expected" in str(error)
        return AT_ONCE
    try:
        apply.with_buffers(params, buffers, line.rows)
    except RuntimeError as error:
        assert "expected" in str(error)
        return AT_THE_CALL
    return FOLLOWED


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:.torch.jit.script")
@pytest.mark.parametrize("line", LINES, ids=lambda line: line.what)
def test_each_line_of_the_table_is_what_happens(line: Line):
    assert outcome(line) == line.outcome
    if line.outcome == FOLLOWED:
        apply, params, buffers = fa.from_module(cases.built(line.make))
        with fa.seeded(1):
            found = apply.with_buffers(params, buffers, line.rows)[0]
        with fa.seeded(1):
            assert torch.equal(found, cases.built(line.make)(line.rows))


def page() -> str:
    """The page."""
    rows = [f"| {line.what} | {line.outcome} | {line.remedy} |" for line in LINES]
    return f"""# What is followed and what is refused

`from_module` makes a function of a module. What a loop with the module itself would do is reproduced exactly, or
refused by an error that names the place and a way out. It is never silently different.

- `from_module` looks at everything that the module reaches through attributes, lists, dicts, closures and weak
  references. It works on a copy; the module itself is never changed.
- The first call of a function, of each of its methods, and of each of its modes is a *rehearsal*: the forward runs once
  more on copies of the parameters, buffers and arguments, and some times more if it keeps something. What it leaves
  behind is found by comparison. Random numbers are put back. A function among the arguments is called each time too.
- Later calls compare version counters and attributes. A difference is an error, and attributes are put back.
- In a graph that is traced before the first call outside of it, the compiler's own record of what was changed is
  looked at. It can't tell what is written before it is read: call the function once before you compile it. Parameters
  that are attributes of other objects are an error of the compiler in such a graph.

| what a module has or does | what becomes of it | what to do |
| --- | --- | --- |
{chr(10).join(rows)}

Further rules:

- `apply(params, ...)` raises where the forward writes to a buffer, and where it would read running statistics without
  being told which. Running statistics are those of normalization layers in eval mode, and every buffer that a call of
  the same function has been seen to write. `apply.eval().bind(state.buffers)(state.params, x)` says which.
- Activation checkpoints need `backend="autograd"`. The copy that a call used keeps its tensors until the backward is
  done: inside `scale_backward` and the step for every call, elsewhere as long as the graph of the output lives.
- A checkpointed part that assigns a buffer anew (`self.n = self.n + 1`) does so again in the backward: refused where
  `scale_backward` or a step takes the derivative. Write in place, which counts twice, as in torch.
- A buffer that the forward leaves with a history, and that a later output depends on, passes gradients on to the calls
  of one loss. Handed out of the loss it is an error: write `.detach()`. In a graph this is not noticed.
- What a backward keeps (an attribute that a hook sets, a buffer that the caller does not get) is an error of the step.
  In a loop of your own it is one of a later call.
- In the forward parameters are `nn.Parameter` to `isinstance`, not to `type()`. Setting their `requires_grad` is
  refused. Outside of a derivative they do not require grad; in a graph they are no leaves.
- Some things only the first call sees: globals that lie in the memory of the original, `requires_grad` that is set,
  gradients of parameters that are read or hooked, and writes through `.data`. In a branch that the first call did not
  take they are not noticed. A write through an array of numpy that changes no value yet is not noticed either.
  Running statistics that `F.batch_norm` or an observer of quantization writes move no version counter: in a branch that
  the first call did not take they are not noticed, nor in a graph where they are no buffers. Use `nn.BatchNorm1d`.
- A checkpoint around `apply.with_buffers` runs it again in the backward: what that run writes to buffers is dropped,
  where torch counts twice. One inside of the module counts twice here too.
- What a forward keeps, it keeps in a copy: a loss that reads `module.aux`, or an object that a hook fills, finds what
  was there before. Return it.
- Two modules that share a layer are two functions with a copy of it each. Make one module of both, and call its parts
  by `apply.method(name)`.
- `apply.train()` and `apply.eval()` call those of the module, on a copy without numbers. They may set flags: what
  merges, fuses or freezes is refused.
- `apply.eval()` of a new process does not know which buffers a training elsewhere has moved, but for those of
  normalization layers. Say `apply.eval().bind(state.buffers)`.
- Arrays of numpy and other buffers are compared after the first call, and those up to 64 KiB after the later ones too.
  Other objects of compiled code are compared after the first call, by what pickle gives.
- What a forward writes outside of the module (a global, an attribute of a class, a file, its arguments) is not looked
  at. Tables outside of the module that a layer or its `id` is the key of, a `WeakKeyDictionary` say, don't know the
  copies.
- Numbers and strings that are attributes of a parameter itself are those of the tensors that a call lays in. In a graph
  they are refused, but for names that begin with an underscore, which a graph reads as missing. Other attributes of
  parameters are refused by `from_module`, and those that a forward sets by the first call.
- Where a forward or a loss leaves its graph (`fullgraph=False`), its writes in place are not seen.
- What a forward writes before it reads it is kept for no other call: a call in another mode, of another method or in
  another branch that reads it first is an error. An object that the module shares with a function is put back instead.
  Whether it is there or is None (`hasattr`, `is None`, `isinstance`) must make no difference: the first call compares.
  In a branch that the first call did not take, this is not noticed.
- `scratch=` is a promise: what these attributes hold after a call is dropped, and no later call reads it. A name that
  no attribute has does nothing.
- Random numbers for a tensor whose memory is not contiguous (dropout after a transpose, say) are drawn in another
  order by `backend="func"` than by torch: other masks of the same distribution. `backend="autograd"` draws torch's.
"""


def test_the_page_is_what_the_lines_give():
    assert PAGE.read_text() == page(), "run python -m tests.test_followed"


if __name__ == "__main__":
    PAGE.write_text(page())

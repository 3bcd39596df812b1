"""How the parts of a step are run: plainly, on a lease, or as graphs. The one place that chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from functional_amp.engine.copies import remember_copied, with_current_copies
from functional_amp.engine.graphs import Compile, compiled, signature, skips_guards, with_own_code, without_guards
from functional_amp.engine.lease import Lease, Leases
from functional_amp.engine.storage import CLOSING, FRESH, IN_GRAPH, Storage
from functional_amp.mode import Mode, mode, stage
from functional_amp.registry import with_fields
from functional_amp.values.grads import ScaledGrads
from functional_amp.values.state import Metrics, TrainState, Window

R = TypeVar("R")
Result = tuple[TrainState, Metrics]


class Runs:
    """The runnable parts of one step.

    Args:
        accumulated: `(state, micro_batch, storage) -> state`.
        updated: `(state, storage) -> (state, metrics)`.
        scanned: `(state, stacked, storage) -> (state, metrics)`.
        may_be_empty: whether a window may have no micro-batches.

    Attributes:
        accumulate, update, scan: the same without the storage, which is chosen here.
    """

    def __init__(
        self,
        accumulated: Callable[[TrainState, Any, Storage], TrainState],
        updated: Callable[[TrainState, Storage], Result],
        scanned: Callable[[TrainState, Any, Storage], Result],
        *,
        donate: bool,
        compile: Compile,
        may_be_empty: bool = False,
    ):
        def closed(state: TrainState, micro_batch: Any, storage: Storage) -> Result:
            summing = CLOSING if mode() == "graph" else storage
            return updated(accumulated(state, micro_batch, summing), storage)

        self._donate, self._compile, self._may_be_empty = donate, compile, may_be_empty
        bodies = {"accumulate": accumulated, "update": updated, "close": closed, "scan": scanned}
        self._bodies = {name: stage(body, detach=not donate) for name, body in bodies.items()}
        self._graphs: dict[tuple[str, bool], Callable[..., Any]] = {}
        self._signatures: dict[tuple[str, bool], Any] = {}
        self._leases = Leases()
        # A part that a user compiles needs a code object of its own.
        self.accumulate = with_own_code(lambda state, micro_batch: self._run("accumulate", state, micro_batch))
        self.update = with_own_code(lambda state: self._run("update", state))
        self.scan = with_own_code(lambda state, micro_batches: self._run("scan", state, micro_batches))

    def window(self, state: TrainState, micro_batches: Iterable[Any]) -> Result:
        """Folds `accumulate` over a window, and closes it."""
        check_state(state)
        if not self._donate or mode() in ("graph", "transform"):
            return self._folded(state, micro_batches, None, True)
        return self._leases.lend(state, lambda state, lease, known: self._folded(state, micro_batches, lease, known))

    def _folded(self, state: TrainState, micro_batches: Iterable[Any], lease: Lease | None, known: bool) -> Result:
        pending: list[Any] = []
        for micro_batch in micro_batches:  # one ahead: the last one closes the window in the same graph
            if pending:
                state = self._part("accumulate", lease, known, state, pending.pop())
            pending.append(micro_batch)
        if not pending and self._may_be_empty:
            return self._part("update", lease, known, state)
        if not pending:
            raise ValueError("micro_batches: found an empty window, expected at least one micro-batch.")
        return self._part("close", lease, known, state, pending.pop())

    def _run(self, name: str, state: TrainState, *given: Any) -> Any:
        check_state(state)
        if not self._donate or mode() in ("graph", "transform"):
            return self._part(name, None, True, state, *given)
        return self._leases.lend(state, lambda state, lease, known: self._part(name, lease, known, state, *given))

    def _part(self, name: str, lease: Lease | None, known: bool, state: TrainState, *given: Any) -> Any:
        """One part on one storage; as a graph where the step is compiled and nobody else compiles it."""
        how = mode()
        if how in ("graph", "transform"):
            return self._run_part(name, lease, known, state, how, *given)
        result = self._run_part(name, lease, known, with_current_copies(state), how, *given)
        if name == "accumulate":
            remember_copied(result)
        return result

    def _run_part(self, name: str, lease: Lease | None, known: bool, state: TrainState, how: Mode, *given: Any) -> Any:
        if self._compile is False or how in ("graph", "transform"):
            storage = lease or (IN_GRAPH if self._donate and how == "graph" else FRESH)
            return self._bodies[name](state, *given, storage)
        key = (name, state.window is None)
        skip = skips_guards(self._compile) and known and self._seen(key, lease, state, given)
        with without_guards(skip):
            if lease is None:
                return self._graph(key)(state, *given)
            with lease.in_graph("window" if name == "accumulate" else "state"):
                return self._graph(key)(state, *given)

    def _graph(self, key: tuple[str, bool]) -> Callable[..., Any]:
        if key not in self._graphs:
            body, storage = self._bodies[key[0]], IN_GRAPH if self._donate else FRESH
            self._graphs[key] = compiled(lambda *given: body(*given, storage), self._compile)
        return self._graphs[key]

    def _seen(self, key: tuple[str, bool], lease: Lease | None, state: TrainState, given: Any) -> bool:
        """Whether the last call of a part had arguments of the same structures and kinds, in the same modes."""
        if lease is not None and state.window is None:  # the lease has compared the rest, leaf by leaf
            state = with_fields(state, params=None, opt_state=None, buffers=None)
        found = signature((state, given))
        before, self._signatures[key] = self._signatures.get(key), found
        return before == found


def check_state(state: Any) -> None:
    """Raises TypeError for anything but a `TrainState`, with a window of its kind."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state: found {type(state).__name__}, expected the TrainState that init_state or the last step gave. "
            "A step returns the pair (state, metrics)."
        )
    window = vars(state).get("window")
    if window is not None and not (isinstance(window, Window) and isinstance(window.grads, ScaledGrads)):
        raise TypeError(
            f"state.window: found {type(window).__name__}, expected None or what step.accumulate opened. "
            "Go on with dataclasses.replace(state, window=None), and repeat the window."
        )

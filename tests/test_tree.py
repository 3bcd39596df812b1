"""select, split, merge and register: laws over random trees, and errors."""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import functional_amp as fa
import functional_amp.testing as own
from functional_amp.torch_private import GLOBAL_NAMESPACE
from functional_amp.traced_tree import flatten_traced
from functional_amp.tree import flatten, flatten_again, path_name, paths, same_leaves

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


ANY = own.layouts(rest=own.REST, gradients=False)


def pairs() -> st.SearchStrategy[tuple[Any, Any]]:
    """Two trees of the same layout."""
    return ANY.flatmap(lambda layout: st.tuples(own.filled(layout), own.filled(layout)))


# select


@given(trees=pairs())
def test_select_takes_the_new_tree_where_true_and_the_old_where_false(trees: tuple[Any, Any]):
    new, old = trees
    assert own.same_bits(fa.select(TRUE, new, old), new)
    assert own.same_bits(fa.select(FALSE, new, old), old)


@given(trees=pairs(), condition=st.booleans())
def test_select_leaks_nothing_from_the_side_not_taken(trees: tuple[Any, Any], condition: bool):
    taken, other = trees
    poison = own.mapped(lambda leaf: leaf * math.nan if leaf.is_floating_point() else leaf, other)
    new, old = (taken, poison) if condition else (poison, taken)
    assert own.same_bits(fa.select(torch.tensor(condition), new, old), taken)


@given(trees=pairs(), condition=st.booleans())
def test_select_writes_to_neither_tree_and_shares_no_storage(trees: tuple[Any, Any], condition: bool):
    new, old = trees
    selected = fa.select(torch.tensor(condition), new, old)
    given_storages = {leaf.data_ptr() for tree in trees for leaf in own.leaves_of(tree) if leaf is not None}
    for leaf in own.leaves_of(selected):
        assert leaf is None or not leaf.numel() or leaf.data_ptr() not in given_storages
    assert all(leaf is None or leaf._version == 0 for tree in trees for leaf in own.leaves_of(tree))


def test_select_returns_a_leaf_that_stands_in_both_trees_as_it_is():
    leaf = torch.ones(2)
    assert fa.select(TRUE, [leaf], [leaf])[0] is leaf


def test_select_pairs_leaves_by_key_not_by_order():
    new = {"b": torch.tensor(2.0), "a": torch.tensor(1.0)}
    old = {"a": torch.tensor(-1.0), "b": torch.tensor(-2.0)}
    assert {name: leaf.item() for name, leaf in fa.select(TRUE, new, old).items()} == {"a": 1.0, "b": 2.0}
    assert {name: leaf.item() for name, leaf in fa.select(FALSE, new, old).items()} == {"a": -1.0, "b": -2.0}


def test_select_chooses_per_member_under_vmap():
    flags = torch.tensor([True, False, True])
    new, old = {"w": torch.arange(6.0).view(3, 2)}, {"w": -torch.arange(6.0).view(3, 2)}
    selected = torch.func.vmap(fa.select)(flags, new, old)
    assert torch.equal(selected["w"], torch.stack([new["w"][0], old["w"][1], new["w"][2]]))


ONE, TWO = torch.ones(1), torch.ones(2)
SELECT_ERRORS: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "missing leaf": ({"a": ONE}, {"a": ONE, "b": ONE}, ValueError, r"missing \['b'\]"),
    "extra leaf": ({"a": ONE, "b": [ONE]}, {"a": ONE}, ValueError, r"extra \['b\.0'\]"),
    "list for tuple": ([ONE], (ONE,), ValueError, "expected"),
    "shape": ({"a": [ONE, TWO]}, {"a": [ONE, ONE]}, ValueError, r"shape \(2,\) at 'a\.1', expected \(1,\)"),
    "dtype": ([ONE], [ONE.half()], TypeError, r"found torch\.float32 at '0', expected torch\.float16"),
    "bare leaf": (TWO, ONE, ValueError, "'<root>'"),
    "number": ({"step": 2}, {"step": 1}, TypeError, "found int 2 at 'step'"),
    "tensor for None": ({"a": ONE}, {"a": None}, TypeError, "found Tensor at 'a' where NoneType"),
    "None for tensor": ({"a": None}, {"a": ONE}, TypeError, "found NoneType at 'a' where Tensor"),
}


@pytest.mark.parametrize("case", SELECT_ERRORS)
def test_select_refuses_trees_that_differ_and_names_the_path(case: str):
    new, old, error, message = SELECT_ERRORS[case]
    with pytest.raises(error, match=message) as raised:
        fa.select(TRUE, new, old, "opt_state")
    assert str(raised.value).startswith("opt_state: ")


# split and merge


@given(tree=ANY.flatmap(own.filled), chance=st.randoms(use_true_random=False))
def test_merge_puts_together_what_split_took_apart(tree: Any, chance: Any):
    chosen, rest = fa.split(tree, lambda path, leaf: chance.random() < 0.5)
    leaves = own.leaves_of(tree)
    for merged in (fa.merge(chosen, rest), fa.merge(rest, chosen)):
        assert optree.tree_structure(merged, none_is_leaf=True) == optree.tree_structure(tree, none_is_leaf=True)
        assert all(a is b for a, b in zip(own.leaves_of(merged), leaves, strict=True))


@given(tree=ANY.flatmap(own.filled))
def test_split_gives_each_leaf_to_one_side_by_the_predicate(tree: Any):
    matrices, rest = fa.split(tree, lambda path, leaf: leaf.ndim == 2)
    for leaf, matrix, other in zip(own.leaves_of(tree), own.leaves_of(matrices), own.leaves_of(rest), strict=True):
        chosen = leaf is not None and leaf.ndim == 2
        assert matrix is (leaf if chosen else None)
        assert other is (None if chosen else leaf)


def test_split_names_paths_through_every_container():
    tree = {"blocks": [{"w": ONE}, (TWO, ONE)], "head": plane()}
    paths: list[str] = []
    fa.split(tree, lambda path, leaf: paths.append(path) is None)
    assert paths == ["blocks.0.w", "blocks.1.0", "blocks.1.1", "head.normal", "head.offset.far", "head.offset.near"]


def test_a_split_tree_differentiates_the_chosen_leaves_alone():
    params = {"body": torch.tensor(2.0), "head": torch.tensor(3.0)}
    trainable, frozen = fa.split(params, lambda path, leaf: path == "head")

    def loss_fn(trainable: Any) -> Tensor:
        merged = fa.merge(trainable, frozen)
        return merged["body"] * merged["head"]

    grads = fa.scale_backward(loss_fn, fa.NoScale(), trainable).grads.tree
    assert grads["body"] is None
    assert grads["head"].item() == 2.0


def test_merge_takes_the_first_leaf_that_is_there():
    first, second, third = {"a": None, "b": ONE}, {"a": TWO, "b": TWO}, {"a": ONE, "b": None}
    merged = fa.merge(first, second, third)
    assert merged["a"] is TWO
    assert merged["b"] is ONE


def test_merge_refuses_trees_of_other_structure_and_names_the_paths():
    with pytest.raises(ValueError, match=r"^merge: .*missing \['b'\]; extra \['c'\]"):
        fa.merge({"a": ONE, "b": None}, {"a": None, "c": ONE})


# register


@dataclass(frozen=True)
class Plane:
    """A node with static fields between its children, and a check that placeholders would fail."""

    normal: Any
    name: str = "unnamed"
    offset: Any = None
    order: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.normal, Tensor):
            raise TypeError("normal")


fa.register(Plane, ("normal", "offset"), ("name", "order"))


def plane() -> Any:
    return Plane(torch.ones(2), "ground", {"far": torch.zeros(1), "near": torch.ones(1)}, 3)


def test_register_returns_the_class():
    @dataclass(frozen=True)
    class Point:
        x: Any

    assert fa.register(Point, ("x",)) is Point


def test_a_registered_node_keeps_its_static_fields_in_both_libraries():
    for mapped in (optree.tree_map(torch.neg, plane()), torch_pytree.tree_map(torch.neg, plane())):
        assert type(mapped) is Plane
        assert (mapped.name, mapped.order) == ("ground", 3)
        assert own.same_bits(mapped.normal, -torch.ones(2))
        assert own.same_bits(mapped.offset, {"far": -torch.zeros(1), "near": -torch.ones(1)})


def test_both_libraries_flatten_a_registered_node_to_the_same_leaves():
    node = plane()
    ours, theirs = optree.tree_leaves(node), torch_pytree.tree_leaves(node)
    assert [id(leaf) for leaf in ours] == [id(leaf) for leaf in theirs]
    assert [id(leaf) for leaf in ours] == [id(node.normal), id(node.offset["far"]), id(node.offset["near"])]


def test_placeholders_may_stand_at_the_children():
    leaves, spec = optree.tree_flatten(plane())
    assert optree.tree_unflatten(spec, [None] * len(leaves)).name == "ground"
    leaves, spec = torch_pytree.tree_flatten(plane())
    assert torch_pytree.tree_unflatten([object()] * len(leaves), spec).name == "ground"


def test_static_fields_belong_to_the_structure():
    node, other = plane(), Plane(torch.ones(2), "ceiling", plane().offset, 3)
    assert optree.tree_structure(node) != optree.tree_structure(other)  # pyright: ignore[reportArgumentType]
    assert torch_pytree.tree_structure(node) != torch_pytree.tree_structure(other)
    with pytest.raises(ValueError, match=r"^select: .*structure"):
        fa.select(TRUE, node, other)


def test_paths_read_as_attributes_in_both_libraries():
    assert optree.tree_paths(plane()) == [("normal",), ("offset", "far"), ("offset", "near")]
    keys = [torch_pytree.keystr(path) for path, _ in torch_pytree.tree_flatten_with_path(plane())[0]]
    assert keys == [".normal", ".offset['far']", ".offset['near']"]


def test_a_registered_node_goes_through_vmap_and_grad():
    scaled = torch.func.vmap(lambda node: fa.select(TRUE, node, node).normal * 2)
    node = Plane(torch.ones(3, 2), "ground", torch.zeros(3))
    assert torch.equal(scaled(node), torch.full((3, 2), 2.0))
    grads = torch.func.grad(lambda node: (node.normal * 3).sum())(Plane(torch.ones(2), "ground", torch.zeros(1)))
    assert grads.name == "ground"
    assert grads.normal.tolist() == [3.0, 3.0]


def test_registering_a_class_twice_is_an_error():
    with pytest.raises(ValueError, match="Plane"):
        fa.register(Plane, ("normal", "offset"), ("name", "order"))


@pytest.mark.parametrize("condition", [True, False])
def test_select_gives_no_history_to_parameters(condition):
    new, old = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.zeros(2))
    selected = fa.select(torch.tensor(condition), {"w": new, "same": old}, {"w": old, "same": old})
    assert not any(leaf.requires_grad for leaf in selected.values())


# flatten_again

_X, _Y = torch.ones(2), torch.zeros(3)
STRUCTURES: list[Any] = [
    {"a": _X, "b": _Y},
    {"b": _Y, "a": _X},
    OrderedDict(b=_Y, a=_X),
    {"a": _X, "b": None},
    {"a": _X},
    {"a": _X, "b": _Y, "c": _X},
    {"a": {"b": _Y}, "b": _Y},
    {"a": (), "b": []},
    {"a": [_X], "b": (_Y,)},
    {"a": fa.ScaledGrads({"w": _X}, 8.0), "b": _Y},
    {},
    (_X, _Y),
    [_X, _Y],
    _X,
    None,
]


@pytest.mark.parametrize("known", range(len(STRUCTURES)))
def test_flatten_again_is_flatten_whatever_structure_is_expected(known: int):
    spec = flatten(STRUCTURES[known]).spec
    for tree in STRUCTURES:
        found, expected = flatten_again(tree, spec), flatten(tree)
        if {type(tree), type(STRUCTURES[known])} == {dict, OrderedDict} and found.spec == spec:
            again = found.unflatten(found.leaves)
            assert again.keys() == tree.keys() and all(again[key] is tree[key] for key in tree)
        else:
            assert found.spec == expected.spec and same_leaves(found.leaves, expected.leaves)


# Flattening in a graph


Pair = namedtuple("Pair", ["first", "second"])


class Named(NamedTuple):
    """A NamedTuple with a registration of its own: one leaf, and a name that is none."""

    name: str
    leaf: Any


def _opened(node: Any) -> Any:
    return (node.leaf,), node.name


def _closed(name: Any, leaves: Any) -> Any:
    return Named(name, *leaves)


with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)  # optree's own rule for NamedTuples is overridden
    optree.register_pytree_node(cast(Any, Named), _opened, _closed, namespace=GLOBAL_NAMESPACE)


KEYS = st.text(max_size=3) | st.integers(-3, 3) | st.booleans() | st.tuples(st.integers(0, 2))


def containers() -> st.SearchStrategy[Any]:
    """Trees of every container that optree knows, with leaves of every kind."""
    leaves = st.none() | st.integers() | st.text(max_size=2) | st.just(ONE) | st.builds(object)

    def around(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        dicts = st.dictionaries(KEYS, inner, max_size=3)
        lists = st.lists(inner, max_size=3)
        return st.one_of(
            lists,
            lists.map(tuple),
            dicts,
            dicts.map(OrderedDict),
            st.builds(defaultdict, st.sampled_from([None, int, list]), dicts),
            st.builds(Pair, inner, inner),
            st.builds(Named, st.text(max_size=1), inner),
            st.builds(fa.ScaledGrads, st.just({"w": ONE}), st.just(2.0), st.just(1.0)),
        )

    return st.recursive(leaves, around, max_leaves=8)


@given(tree=containers())
def test_a_tree_is_flattened_in_a_graph_as_optree_does_it(tree: Any):
    leaves, spec = flatten_traced(tree)
    expected, expected_spec = optree.tree_flatten(tree, none_is_leaf=True)
    assert same_leaves(leaves, expected)
    assert spec.paths() == optree.tree_paths(tree, none_is_leaf=True)
    rebuilt, direct = spec.unflatten(leaves), optree.tree_unflatten(expected_spec, leaves)
    assert optree.tree_structure(rebuilt, none_is_leaf=True) == expected_spec
    assert same_leaves(optree.tree_leaves(rebuilt, none_is_leaf=True), leaves)
    assert orders(rebuilt) == orders(direct)


@given(one=containers(), other=containers())
def test_two_structures_are_equal_in_a_graph_where_they_are_to_optree(one: Any, other: Any):
    pairs: list[tuple[Any, Any]] = [(one, other), (one, one), ({"a": one}, {"a": other}), ([one], [one])]
    for left, right in pairs:
        same = optree.tree_structure(left, none_is_leaf=True) == optree.tree_structure(right, none_is_leaf=True)
        assert (flatten_traced(left)[1] == flatten_traced(right)[1]) is same


def orders(node: Any) -> Any:
    """The keys of all dicts, as they were inserted."""
    if isinstance(node, dict):
        return [(key, orders(value)) for key, value in node.items()]
    return [orders(value) for value in node] if isinstance(node, (list, tuple)) else None


def test_two_dicts_of_one_structure_may_have_their_keys_in_another_order():
    one, other = {"a": ONE, "b": ONE}, {"b": ONE, "a": ONE}
    assert flatten_traced(one)[1] == flatten_traced(other)[1]
    assert list(flatten_traced(other)[1].unflatten([ONE, TWO])) == ["b", "a"]


@pytest.mark.parametrize(
    "tree",
    [
        {"b": [ONE, None], "a": {"c": ONE, 1: ()}, "": {}},
        OrderedDict(b=ONE, a=Pair(ONE, None)),
        ([ONE, 2.0], [{}, "name"], {2: ONE, 1: ONE}, {2: ONE, "a": ONE}),
        [Named("a", ONE), Pair(ONE, Named("b", None))],
        defaultdict(list, b=[ONE], a=fa.ScaledGrads({"w": ONE}, scale=ONE[0], weight=ONE[0])),
        [defaultdict(list), defaultdict(None, {2: ONE, "a": ONE, 1: defaultdict(int)})],
    ],
    ids=["dicts", "ordered", "keys", "named", "defaultdict", "defaultdicts"],
)
@pytest.mark.usefixtures("fresh_dynamo")
def test_trees_keep_their_paths_and_containers_in_a_graph(tree: Any):
    @torch.compile(backend="aot_eager", fullgraph=True)
    def graph(tree: Any) -> Any:
        flat = flatten(tree)
        doubled = [leaf * 2 if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves]
        return flat.unflatten(doubled), paths(tree)

    result, found = graph(tree)
    assert found == [path_name(path) for path in optree.tree_paths(tree, none_is_leaf=True)]
    expected = optree.tree_map(lambda leaf: leaf * 2 if isinstance(leaf, Tensor) else leaf, tree, none_is_leaf=True)
    assert own.same_bits(result, expected) and orders(result) == orders(expected)
    assert optree.tree_structure(result, none_is_leaf=True) == optree.tree_structure(expected, none_is_leaf=True)


def in_deque(place: str, holder: Any, compile: Any) -> Any:
    """A step over a state or aux with a container at one place, and what the step gives for that place."""

    def loss_fn(params: Any, x: Tensor, *buffers: Any) -> fa.Loss:
        aux = holder([x]) if place == "aux" else None
        return fa.Loss(optree.tree_leaves(params)[0].sum() * x, aux=aux, buffers=buffers[0] if buffers else None)

    given = {"w": holder([torch.ones(2)])} if place == "params" else {"w": torch.ones(2)}
    optimizer = fa.sgd(0.1)
    state = fa.init_state(given, optimizer, buffers=holder([torch.ones(2)]) if place == "buffers" else None)
    state, metrics = fa.make_step(loss_fn, optimizer, compile=compile)(state, [torch.tensor(2.0)])
    return {"params": state.params, "aux": metrics.aux, "buffers": state.buffers}[place]


@pytest.mark.parametrize("place", [pytest.param(name, marks=pytest.mark.slow) for name in ("params", "aux", "buffers")])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_deque_is_refused_in_a_graph_which_would_lose_its_maxlen(place: str):
    holder, graph = partial(deque, maxlen=5), {"backend": "aot_eager"}
    kept = in_deque(place, holder, False)
    assert (kept["w"] if place == "params" else kept).maxlen == 5
    with pytest.raises(
        Exception, match=r"found a deque in a compiled step, expected a list or a tuple.*list\(\.\.\.\)"
    ):
        in_deque(place, holder, graph)
    assert own.same_bits(in_deque(place, list, graph), in_deque(place, list, False))  # the remedy


@pytest.mark.usefixtures("fresh_dynamo")
def test_a_deque_in_a_batch_of_a_graph_is_given_to_the_loss():
    optimizer, params = fa.sgd(0.1), {"w": torch.ones(2)}
    step = fa.make_step(lambda p, x: p["w"].sum() * x[0], optimizer, compile={"backend": "aot_eager"})
    state, _ = step(fa.init_state(params, optimizer), [deque([torch.tensor(2.0)])])
    torch.testing.assert_close(state.params["w"], torch.tensor([0.8, 0.8]))

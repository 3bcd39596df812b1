"""Parameters of which each rank holds a part, and losses over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from functional_amp.dtypes import is_differentiable, like, scalar_dtype
from functional_amp.engine.sharded import is_sharded
from functional_amp.ranks.mesh import Group, groups_of
from functional_amp.ranks.reduce import buffers_over
from functional_amp.registry import with_fields
from functional_amp.stages.aux import aux_sum
from functional_amp.torch_private import all_reduced, root_mesh
from functional_amp.tree import PyTree, flatten, flatten_tensors, map_tensors
from functional_amp.values.grads import Loss, as_loss, check_loss_fn, is_one

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def shard(params: PyTree, mesh: DeviceMesh) -> PyTree:
    """Distribute a tree over ranks: each holds an n-th of each leaf, along its first dimension.

    Args:
        params: a pytree of tensors, the same on all ranks; those of the mesh's first rank count. 0-dim leaves,
            integer and bool leaves stay whole. A leaf that is a DTensor on other dimensions of the same mesh
            (tensor parallelism) is sharded further, along a dimension that it is not sharded on; where it has
            none, it stays as it is.
        mesh: of one dimension, or with names; of several the last is sharded on, and the parameters are the same
            along the others (HSDP).

    Returns:
        The tree with DTensors at its leaves, which may be given to `init_state`.

    Raises:
        TypeError, ValueError: for a leaf that is not a tensor, a mesh that is not one or has no names.
    """
    groups_of(mesh)
    if mesh.ndim > 1:
        if mesh.mesh_dim_names is None:
            raise ValueError(
                f"mesh: found {mesh.ndim} dimensions without names, expected names. "
                'Write init_device_mesh(..., mesh_dim_names=("replicate", "shard")).'
            )
        mesh = mesh[mesh.mesh_dim_names[-1]]
    flat = flatten_tensors(params, "params")
    return flat.unflatten([_distributed(leaf, mesh) for leaf in flat.leaves])


def _distributed(leaf: Any, mesh: Any) -> Any:
    from torch.distributed.tensor import Shard, distribute_tensor

    if not is_differentiable(leaf) or leaf.dim() == 0:
        return leaf
    if not is_sharded(leaf):
        return distribute_tensor(leaf.detach(), mesh, [Shard(0)])
    return _sharded_further(leaf, mesh)


def _sharded_further(leaf: Any, mesh: Any) -> Any:
    """A DTensor on the dimensions of a tensor-parallel mesh, split along a dimension that these leave whole."""
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    taken = {placement.dim for placement in leaf.placements if placement.is_shard()}
    free = [dim for dim in range(leaf.dim()) if dim not in taken and leaf.shape[dim] > 1]
    if not free:
        return leaf
    inner = leaf.device_mesh
    both = root_mesh(mesh)[(*mesh.mesh_dim_names, *inner.mesh_dim_names)]
    with torch.no_grad():
        part = distribute_tensor(leaf.to_local().detach(), mesh, [Shard(free[0])]).to_local()
    placements = [Shard(free[0]), *leaf.placements]
    return DTensor.from_local(part, both, placements, run_check=False, shape=leaf.shape, stride=leaf.stride())


def broadcast(tree: PyTree, mesh: DeviceMesh) -> PyTree:
    """Give all ranks the tensors of the mesh's first rank: where runs that must be the same begin.

    Args:
        tree: a pytree of tensors, of the same structure, shapes and dtypes on all ranks; it is not changed.

    Raises:
        TypeError: for a leaf that is not a tensor, a mesh that is not one.
    """
    from torch.distributed.tensor import Replicate, distribute_tensor

    groups_of(mesh)
    flatten_tensors(tree, "tree")
    placements = [Replicate()] * mesh.ndim

    def sent(leaf: Tensor) -> Tensor:
        own = leaf.detach().clone()
        whole = distribute_tensor(own, mesh, placements).to_local()  # row by row in memory
        return whole if whole.stride() == own.stride() else own.copy_(whole)

    return map_tensors(sent, tree)


def gather(leaf: Any, dtype: torch.dtype | None = None, like: Any = None) -> Any:
    """Make a leaf whole on each rank, in the dtype to compute in; its transpose sums and scatters in float32.

    Args:
        leaf: a DTensor of `shard`; another tensor is only cast.
        dtype: of the result, and of what is sent; None for the leaf's own.
        like: a DTensor (of tensor parallelism) whose mesh and placements the result is to have; None for a
            plain tensor.

    Returns:
        A plain tensor, or a DTensor as `like` is.
    """
    if not is_sharded(leaf):
        return leaf if dtype is None or not leaf.is_floating_point() else leaf.to(dtype)
    from torch.distributed.tensor import DTensor, Partial, Replicate

    names = () if like is None else like.device_mesh.mesh_dim_names
    mesh = leaf.device_mesh
    kept = [bool(names) and name in names for name in mesh.mesh_dim_names or [None] * mesh.ndim]
    before = leaf.placements
    placements = [old if keep else Replicate() for old, keep in zip(before, kept, strict=True)]
    grads = [old if keep else Partial() for old, keep in zip(before, kept, strict=True)]
    whole = leaf.redistribute(placements=placements, forward_dtype=dtype, backward_dtype=_wide(leaf))
    part = whole.to_local(grad_placements=grads)
    if like is None:
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )


def _wide(leaf: Tensor) -> torch.dtype:
    """What gradients are summed in over ranks."""
    return torch.promote_types(leaf.dtype, torch.float32)


def sharded(loss_fn: Callable[..., Tensor | Loss], mesh: DeviceMesh) -> Callable[..., Loss]:
    """Make the loss of each rank's own items the loss of the items of all ranks that share the shards.

        W = sum over ranks of weight;   value = sum over ranks of weight * value / W

    The backward of a gathered parameter sums over the ranks at once, so the weights must be known before it. One
    small message a micro-batch tells them. All ranks need the same number of micro-batches: a rank that has run
    out gives one with `Loss(..., weight=0)` (of sums `Loss(0 * value, ...)`), whose derivatives must be finite.

    Args:
        loss_fn: `loss_fn(params, micro_batch)` or with buffers, as `make_step` takes it.
        mesh: the dimensions of the mesh that the parameters are sharded on, without those of tensor parallelism.

    Returns:
        A loss function for `make_step(..., mesh=)`; value, weight, aux and buffers are the same on all ranks.
        It is differentiated by the autograd engine: torch.func can't differentiate DTensors.

    Raises:
        TypeError: for a loss function or a mesh that is not one.
    """
    check_loss_fn(loss_fn)
    groups = groups_of(mesh)

    @functools.wraps(loss_fn)
    def global_loss(params: PyTree, *batch: Any) -> Loss:
        loss = as_loss(loss_fn(params, *batch))
        if loss.reduction == "sum" and not is_one(loss.weight):
            raise ValueError(
                "sharded: found weight 0 with reduction='sum', expected 1, as other ranks' sums may count. "
                "Return Loss(0 * value, reduction='sum'), whose derivatives are finite."
            )
        value = loss.value
        with torch.no_grad():
            weight = torch.as_tensor(loss.weight).to(value.device, torch.float32).detach()
            counted = weight > 0
            aux = None if loss.aux is None else aux_sum(None, map_aux(loss.aux), weight, first=True)
            flat = flatten(aux)
            held = [leaf for leaf in flat.leaves if leaf is not None]
            wide = scalar_dtype(value.device)
            own = torch.where(counted, value.to(wide) * weight, 0)
            weights, values, *sums = _summed([weight.to(wide), own, *held], groups)
            total = torch.where(weights == 0, 1, weights)
            share = torch.where(counted, weight / total, 0).to(value.dtype)
            mean = (values if loss.reduction == "sum" else values / total).to(value.dtype)
            if loss.reduction == "mean":
                sums = [leaf / like(total, leaf).to(leaf.real.dtype) for leaf in sums]
            sums = iter(sums)
            aux = flat.unflatten([None if leaf is None else next(sums) for leaf in flat.leaves])
        own = value if loss.reduction == "sum" else torch.where(counted, value, 0) * share
        # The number of all ranks, with the derivative of this one's part.
        value = own + torch.where(own.isfinite(), mean - own, mean).detach()
        buffers = loss.buffers
        if buffers is not None:
            buffers = buffers_over(batch[-1], buffers, share, groups)
        weight = 1.0 if loss.reduction == "sum" else weights.to(torch.float32)
        return with_fields(loss, value=value, weight=weight, aux=aux, buffers=buffers)

    cast(Any, global_loss).sharded_over = groups
    return global_loss


def map_aux(aux: PyTree) -> PyTree:
    """The aux of a loss without history."""
    flat = flatten(aux)
    return flat.unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in flat.leaves])


def _summed(values: list[Tensor], groups: tuple[Group, ...]) -> list[Tensor]:
    """The sums of small tensors over ranks, in one message for each group."""
    wide = values[0].dtype
    if any([value.is_complex() for value in values]):
        raise TypeError("aux: found a complex tensor, expected real ones from a sharded loss. Hand out view_as_real.")
    flat = torch.cat([value.reshape(-1).to(wide) for value in values])
    for group in groups:
        (flat,) = all_reduced([flat], group.name)
    parts = flat.split([value.numel() for value in values])
    return [
        part.reshape(value.shape).to(value.dtype if place > 1 else wide)
        for place, (part, value) in enumerate(zip(parts, values, strict=True))
    ]

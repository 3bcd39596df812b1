"""Reading a checkpoint that torch.distributed.checkpoint has written, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_amp.checkpoint import check_template, load_state_dict, state_dict, with_window_of
from functional_amp.values.state import TrainState


def load_shards(folder: str | Path, template: TrainState) -> tuple[TrainState, dict[str, Tensor]]:
    """Read what `torch.distributed.checkpoint.save(state_dict(state))` wrote. All ranks must call.

    Each rank reads the parts that its template holds: the number of ranks, and what is sharded, may have changed.
    DCP by itself casts dtypes and loads subsets without a word: here all names of the folder are read, in the
    dtypes and shapes they were saved in, and `load_state_dict` compares them with the template.

    Args:
        folder: the `checkpoint_id`. Its `.metadata` is a pickle: read only folders that you wrote.
        template: as for `load_state_dict`, on this rank: the leaves that are DTensors are read in parts.

    Returns:
        The state, and the entries under `extra/`. An open window is on all ranks: see `part_window`.

    Raises:
        FileNotFoundError: for a folder without a checkpoint, or with half of one.
        TypeError: for a template that is not a `TrainState`.
        ValueError: naming every difference between the two.
    """
    check_template(template)
    if not Path(folder, ".metadata").is_file():
        raise FileNotFoundError(
            f"{folder}: found no .metadata, expected a folder that torch.distributed.checkpoint.save wrote to its end. "
            "Remedy: pass its checkpoint_id; load(path) reads what save(path, flat) wrote."
        )
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    saved: dict[str, Any] = {name: e for name, e in entries.items() if isinstance(e, TensorStorageMetadata)}
    if "window_open" in saved:
        is_open = {"window_open": torch.zeros((), dtype=torch.bool)}
        dcp.load(is_open, checkpoint_id=folder)
        names = {name: torch.empty(0, dtype=entry.properties.dtype) for name, entry in saved.items()}
        template = with_window_of({**names, **is_open}, template)
    own = state_dict(template)
    flat: dict[str, Any] = {}
    for name, entry in saved.items():
        like, dtype = own.get(name), entry.properties.dtype
        if like is not None and like.shape == entry.size:
            flat[name] = torch.empty_like(like, dtype=dtype)
        else:
            flat[name] = torch.empty(entry.size, dtype=dtype)
    dcp.load(flat, checkpoint_id=folder)
    extra = {name: value for name, value in flat.items() if name.startswith("extra/")}
    return load_state_dict(template, flat), extra

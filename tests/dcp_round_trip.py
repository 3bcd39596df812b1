"""A state in mid-window through torch.distributed.checkpoint on one process, and what DCP does not notice.

Run by a test: python dcp_round_trip.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import functional_amp as fa
from tests.test_checkpoint import bits, mid_window_state, small_state


def load(folder: Path) -> dict[str, Tensor]:
    """All that is in a folder, as it is: the recipe of docs/checkpoints.md."""
    metadata = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    flat = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(flat, checkpoint_id=folder)
    return flat


def main(folder: Path) -> None:
    state, template, step = mid_window_state()
    flat = fa.state_dict(state, position=7)
    dcp.save(flat, checkpoint_id=folder / "sync")
    assert bits(load(folder / "sync")) == dict(sorted(bits(flat).items()))
    resumed = fa.load_state_dict(template, load(folder / "sync"))
    assert bits(fa.state_dict(step.update(resumed)[0])) == bits(fa.state_dict(step.update(state)[0]))

    # dcp.load into the tensors of a state reads a subset without a word; load_state_dict notices the open window.
    subset = fa.state_dict(step.update(state)[0])
    dcp.load(subset, checkpoint_id=folder / "sync")
    try:
        fa.load_state_dict(template, subset)
    except ValueError as error:
        assert "window/loss: found nothing" in str(error)
    else:
        raise AssertionError("the open window was dropped")

    # It casts dtypes without a word, too: what is asked for in another dtype comes in that one.
    small = fa.state_dict(small_state())
    dcp.save(small, checkpoint_id=folder / "small")
    asked = {name: leaf.double() if name == "params/w" else leaf for name, leaf in small.items()}
    dcp.load(asked, checkpoint_id=folder / "small")
    assert asked["params/w"].dtype == torch.float64
    try:
        fa.load_state_dict(small_state(), asked)
    except ValueError as error:
        assert "params/w: found torch.float64" in str(error)
    else:
        raise AssertionError("the dtype was taken")

    # And a flipped byte.
    (data,) = (folder / "sync").glob("*.distcp")
    raw = bytearray(data.read_bytes())
    place = raw.find(flat["params/head.weight"].view(torch.uint8).numpy().tobytes())
    raw[place] ^= 1
    data.write_bytes(raw)
    damaged = load(folder / "sync")
    assert bits(damaged) != dict(sorted(bits(flat).items()))
    print("as expected")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

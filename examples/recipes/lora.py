"""Train LoRA adapters in float32 on a base that is frozen in float16: lora.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa

WINDOWS, WORDS = 8, 32


def make_model() -> Any:
    """A small GPT-2 in half precision, with adapters. PEFT freezes the base and keeps the adapters in float32."""
    torch.manual_seed(0)
    size: dict[str, Any] = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    config = transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=0)
    base = transformers.GPT2LMHeadModel(config).half()
    adapters = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    return peft.get_peft_model(base, adapters).eval()  # eval: the base has dropout


def make_windows() -> Iterator[list[Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        starts = torch.randint(WORDS, (2, 8, 1), generator=random)
        yield list((starts + torch.arange(16)) % WORDS)


def main() -> tuple[fa.TrainState, nn.Module]:
    """Gives the state, and the model with the trained adapters."""
    model = make_model()
    apply, params, base = fa.from_module(model)  # params: the adapters alone. The frozen base is among the buffers
    print(f"{sum(p.numel() for p in params.values())} parameters on a base of {sum(b.numel() for b in base.values())}")

    def loss_fn(params: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits = apply(params, tokens).logits.float()
        return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    optimizer = fa.adamw(5e-2)
    step = fa.make_step(loss_fn, optimizer, max_norm=1.0)  # no autocast: the base computes in its own dtype
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**22))
    losses = []
    for window in make_windows():
        state, metrics = step(state, window)
        losses.append(metrics.loss)
    fa.to_module(model, state.params)  # now model.save_pretrained(folder) writes the adapters
    print(f"loss {losses[-1]:.3f}, applied {state.applied}, skipped {state.skipped}")
    return state, model


if __name__ == "__main__":
    main()

"""Train a language model on documents packed end to end, each token weighing the same: packed.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import functional_amp as fa

Packed = tuple[Tensor, Tensor, Tensor]
WINDOWS, LENGTH, WORDS, IGNORED = 6, 24, 16, -100


class Attention(nn.Module):
    """One layer of causal attention in which no token sees another document."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.mix, self.out = nn.Embedding(WORDS, 32), nn.Linear(32, 96), nn.Linear(32, WORDS)

    def forward(self, tokens: Tensor, document: Tensor) -> Tensor:
        hidden = self.words(tokens)
        query, key, value = self.mix(hidden).chunk(3, dim=-1)
        seen = (document[:, :, None] == document[:, None, :]).tril()
        return self.out(hidden + scaled_dot_product_attention(query, key, value, attn_mask=seen))


def make_documents() -> Iterator[list[Tensor]]:
    """For each window, documents of very different lengths: runs of words that count up."""
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        lengths = torch.randint(2, 17, (12,), generator=random).tolist()
        starts = torch.randint(WORDS, (12,), generator=random).tolist()
        yield [(start + torch.arange(n)) % WORDS for start, n in zip(starts, lengths, strict=True)]


def packed(documents: list[Tensor]) -> list[Packed]:
    """Micro-batches of one row each: tokens, the number of the document, and the next token of the same document."""
    rows: list[list[Tensor]] = [[]]
    for document in documents:
        if sum(map(len, rows[-1])) + len(document) > LENGTH:
            rows.append([])
        rows[-1].append(document)
    window = []
    for row in rows:
        tokens, number, targets = torch.zeros(3, 1, LENGTH, dtype=torch.int64)
        number -= 1
        targets += IGNORED
        place = 0
        for index, document in enumerate(row):
            end = place + len(document)
            tokens[0, place:end], number[0, place:end], targets[0, place : end - 1] = document, index, document[1:]
            place = end
        window.append((tokens, number, targets))
    return window


def main() -> tuple[fa.TrainState, list[fa.Metrics]]:
    apply, params, _ = fa.from_module(Attention())

    def loss_fn(params: dict[str, Tensor], row: Packed) -> fa.Loss:
        tokens, document, targets = row
        logits = apply(params, tokens, document).float()
        mean = cross_entropy(logits[0], targets[0], ignore_index=IGNORED)
        return fa.Loss(mean, weight=(targets != IGNORED).sum())

    optimizer = fa.adamw(1e-2)
    # torch.func does not know attention with a mask under autocast on a CPU; elsewhere leave the backend out.
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, max_norm=1.0, backend="autograd")
    state, log = fa.init_state(params, optimizer), []
    for documents in make_documents():
        state, metrics = step(state, packed(documents))
        log.append(metrics)
    print(f"loss of a token {log[0].loss:.3f} at first, {log[-1].loss:.3f} in the end, {log[-1].weight} tokens")
    return state, log


if __name__ == "__main__":
    main()

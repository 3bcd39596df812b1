"""Windows with a planted fault each, and the right answers for `explain`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_amp as fa

INF = float("inf")


@dataclass(frozen=True)
class Case:
    """A window that is not finite at a scale."""

    loss_fn: Callable[..., Any]
    params: Any
    window: list[Any]
    scale: float
    buffers: Any = None
    compute_dtype: torch.dtype | None = None
    seed: int | None = None


@dataclass(frozen=True)
class Plant:
    """A case and the answers that are right.

    Attributes:
        build: makes the case.
        stage, micro_batch, module, source: as in the explanation.
        operator: any of these names; one operator has several, by backend and by kernel.
        node: what the autograd node's name starts with.
        line: a part of the source line, "" where none is asked.
        scalable: whether a smaller scale helps.
        backends: those that can differentiate it.
    """

    name: str
    build: Callable[[], Case]
    stage: str
    micro_batch: int | None = 0
    module: str = ""
    operator: tuple[str, ...] = ()
    source: str = ""
    node: str = ""
    line: str = ""
    scalable: bool = False
    backends: tuple[str, ...] = ("autograd", "func")


PLANTS: list[Plant] = []


def plant(stage: str, **answers: Any) -> Callable[[Callable[[], Case]], Callable[[], Case]]:
    def add(build: Callable[[], Case]) -> Callable[[], Case]:
        PLANTS.append(Plant(build.__name__, build, stage, **answers))
        return build

    return add


SIGNS = torch.tensor([1.0, -1.0, 1.0, -1.0])  # large gradients, small loss
CONVOLUTION = ("convolution", "mkldnn_convolution")
MATMUL = ("mm", "addmm", "bmm", "baddbmm")


class Attention(nn.Module):
    """One head; `naive` takes the softmax in float16 without subtracting the maximum."""

    def __init__(self, width: int = 16, naive: bool = False):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.naive = naive

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        if mask is not None:
            scores = scores.masked_fill(mask, -INF)
        if self.naive:
            powers = scores.half().exp()
            weights = powers / powers.sum(-1, keepdim=True)
        else:
            weights = scores.softmax(-1)
        return weights @ self.value(x).to(weights.dtype)


class Encoder(nn.Module):
    """Embedding, attention, norm, a linear layer that a plant may spoil, and a head."""

    def __init__(self, naive: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.attention = Attention(naive=naive)
        self.norm = nn.LayerNorm(16)
        self.wide = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, mask)
        return self.head(torch.tanh(self.wide(self.norm(x)))).mean(1)


def tokens() -> Tensor:
    return torch.randint(1, 10, (4, 5))


def labels(n: int = 4, classes: int = 4) -> Tensor:
    return torch.randint(classes, (n,))


def classified(module: nn.Module, window: list[Any], scale: float, **given: Any) -> Case:
    """A module trained by cross-entropy under float16 autocast, on pairs of (arguments, labels)."""
    apply, params, buffers = fa.from_module(module)
    if buffers:

        def with_buffers(params: Any, batch: Any, buffers: Any) -> fa.Loss:
            out, buffers = apply.with_buffers(params, buffers, *batch[0])
            return fa.Loss(F.cross_entropy(out.float(), batch[1]), buffers=buffers)

        return Case(fa.autocast(with_buffers, torch.float16), params, window, scale, buffers, **given)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(apply(params, *batch[0]).float(), batch[1])

    return Case(fa.autocast(loss_fn, torch.float16), params, window, scale, **given)


def scaled_(parameter: Tensor, factor: float) -> None:
    parameter.data.mul_(factor)


# Faults of the forward.


@plant("forward", module="attention", operator=("exp",), line="scores.half().exp()")
def softmax_without_the_maximum() -> Case:
    module: Any = Encoder(naive=True)
    scaled_(module.attention.query.weight, 12)
    scaled_(module.attention.key.weight, 12)
    return classified(module, [((tokens(),), labels()) for _ in range(2)], 2.0**10)


@plant("forward", micro_batch=1, operator=("log",), line="target.log()")
def log_of_zero_in_the_data() -> Case:
    apply, params, _ = fa.from_module(nn.Sequential(nn.Linear(4, 4)))

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, target = batch
        return F.mse_loss(apply(params, x).float(), target.log())

    window = [(torch.randn(3, 4), torch.rand(3, 4) + 0.1) for _ in range(3)]
    window[1][1][0, 0] = 0
    return Case(fa.autocast(loss_fn, torch.float16), params, window, 2.0**10)


@plant("forward", micro_batch=3, operator=("div",), line="/ weights.sum()")
def zero_over_zero_in_the_last_of_four() -> Case:
    apply, params, _ = fa.from_module(Encoder())

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, y, weights = batch
        losses = F.cross_entropy(apply(params, x).float(), y, reduction="none") * weights
        return losses.sum() / weights.sum()

    window = [(tokens(), labels(), torch.ones(4)) for _ in range(4)]
    window[3][2].zero_()
    return Case(fa.autocast(loss_fn, torch.float16), params, window, 2.0**10)


class Repeated(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(8, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(30):
            x = torch.relu(self.cell(x))
        return self.out(x)


@plant("forward", module="cell", operator=MATMUL, line="self.cell(x)")
def exploding_recurrent_forward() -> Case:
    module: Any = Repeated()
    module.cell.weight.data = module.cell.weight.data.abs() * 2
    return classified(module, [((torch.randn(4, 8).abs(),), labels(4, 2))], 1.0)


@plant("forward", operator=("pow", "mul"), line="hidden * hidden")
def plain_function_whose_square_overflows() -> Case:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        hidden = x @ params["w"]
        return (hidden * hidden).float().mean()

    return Case(fa.autocast(loss_fn, torch.float16), {"w": torch.randn(4, 4)}, [torch.randn(3, 4) * 1e3], 2.0**4)


@plant("forward", module="1", operator=MATMUL, backends=("autograd",), line="body(params['block'], x)")
def checkpointed_block_overflows_forward() -> Case:
    block: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    head = nn.Linear(4, 2)
    block[1].weight.data.fill_(6e4)
    block[0].bias.data.fill_(9)
    body, block_params, _ = fa.from_module(block)
    top, head_params, _ = fa.from_module(head)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        hidden: Any = checkpoint(lambda x: body(params['block'], x), batch[0], use_reentrant=False)  # fmt: skip
        return F.cross_entropy(top(params["head"], hidden).float(), batch[1])

    window = [(torch.randn(3, 4), labels(3, 2))]
    return Case(fa.autocast(loss_fn, torch.float16), {"block": block_params, "head": head_params}, window, 2.0**4)


@plant("forward", module="attention", operator=("_softmax",), line="scores.softmax(-1)")
def row_of_the_mask_without_an_open_position() -> Case:
    mask = torch.ones(5, 5).triu(1).bool().expand(4, 5, 5).clone()
    mask[2, 3] = True
    return classified(Encoder(), [((tokens(), mask), labels())], 2.0**4)


@plant("forward", operator=("_softmax",), line="body(params, x, x, x")
def padding_that_closes_every_key_of_a_sample() -> Case:
    """The mask reaches the scores through a fused product and sum."""
    body, params, _ = fa.from_module(nn.MultiheadAttention(8, 2, batch_first=True))

    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, padding = batch
        return body(params, x, x, x, key_padding_mask=padding)[0].square().mean()

    padding = torch.tensor([[False, False, True], [True, True, True]])
    return Case(loss_fn, params, [(torch.randn(2, 3, 8), padding)], 2.0**4)


@plant("forward", module="wide", operator=("_to_copy",))
def weight_that_does_not_fit_float16() -> Case:
    module: Any = Encoder()
    scaled_(module.wide.weight, 1e6)
    return classified(module, [((tokens(),), labels())], 2.0**4)


@plant("forward", operator=("_to_copy",))
def weight_that_does_not_fit_the_compute_dtype() -> Case:
    apply, params, _ = fa.from_module(nn.Linear(4, 1))
    params = {**params, "weight": torch.full((1, 4), 1e5)}

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x.half()).float().mean()

    return Case(loss_fn, params, [torch.randn(3, 4)], 2.0**4, compute_dtype=torch.float16)


class Gated(nn.Module):
    """A GRU written out."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(12, 16)
        self.candidate = nn.Linear(12, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, sequence: Tensor) -> Tensor:
        state = sequence.new_zeros(sequence.shape[0], 8)
        for x in sequence.unbind(1):
            reset, update = self.gates(torch.cat([x, state], -1)).sigmoid().chunk(2, -1)
            proposed = self.candidate(torch.cat([x, reset * state], -1))
            state = update * state + (1 - update) * proposed * proposed  # no tanh: it grows
        return self.out(state)


@plant("forward", micro_batch=1, operator=("mul",), line="proposed * proposed")
def gated_recurrent_net_grows_over_time() -> Case:
    window = [((torch.randn(3, 6, 4) * size,), labels(3, 2)) for size in (0.01, 300.0)]
    return classified(Gated(), window, 2.0**4)


@plant("forward", module="lstm", operator=("mul",))
def lstm_whose_input_is_nan_after_a_bad_normalization() -> Case:
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.out = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)
            self.lstm.register_forward_pre_hook(lambda module, args: (args[0] * (args[0].abs().sum() * INF),))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.lstm(x)[0][:, -1])

    x = torch.randn(3, 5, 4)
    x[0, 0] = 0  # 0 * inf
    apply, params, _ = fa.from_module(Recurrent())  # in float32: a CPU has no LSTM of float16
    return Case(lambda p, b: F.cross_entropy(apply(p, b[0]), b[1]), params, [(x, labels(3, 2))], 2.0**4)


@plant("forward", module="norm", operator=("rsqrt",), line="rsqrt()")
def normalization_without_an_eps() -> Case:
    class RMSNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.float().square().mean(-1, keepdim=True).rsqrt()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.out = nn.Linear(4, 4, bias=False), RMSNorm(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.first(x)))

    x = torch.randn(3, 4)
    x[1] = 0
    return classified(Net(), [((x,), labels(3, 2))], 2.0**4)


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))


@plant("forward", micro_batch=1, module="second.0", operator=CONVOLUTION)
def convolution_overflows_forward() -> Case:
    module: Any = ConvNet()
    scaled_(module.first[1].weight, 1e4)
    scaled_(module.second[0].weight, 3e2)
    module.first[0].bias.data.zero_()
    module.first[0].weight.data.abs_()
    flat = torch.zeros(4, 2, 6, 6)  # batch norm of a constant is its bias, 0
    return classified(module, [((x,), labels(4, 3)) for x in (flat, torch.randn(4, 2, 6, 6) * 10)], 2.0**2)


@plant("forward", micro_batch=2, module="1", operator=("rsqrt", "native_batch_norm", "_native_batch_norm_legit"))
def statistics_of_an_earlier_micro_batch() -> Case:
    """The second micro-batch spoils a running variance that the third reads."""

    class Running(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("variance", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            out = x * self.variance.rsqrt()
            self.variance = x.detach().float().var(0)
            return out

    x = torch.randn(3, 4)
    module: Any = nn.Sequential(nn.Linear(4, 4), Running(), nn.Linear(4, 2))
    window = [((x,), labels(3, 2)), ((x[:1].expand(3, 4),), labels(3, 2)), ((x,), labels(3, 2))]
    return classified(module, window, 2.0**4)


@plant("forward", operator=("exp",), line="scores.exp()")
def per_sample_losses_under_vmap() -> Case:
    def one(w: Tensor, x: Tensor) -> Tensor:
        scores = x.half() @ w.half()
        return scores.exp().sum().log().float()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return torch.vmap(one, in_dims=(None, 0))(params["w"], x).mean()

    return Case(loss_fn, {"w": torch.ones(4, 3)}, [torch.tensor([[1.0] * 4, [3.0] * 4])], 2.0**3)


@plant("forward", operator=("log",), line="(1 - probabilities).log()")
def saturated_sigmoid() -> Case:
    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, y = batch
        probabilities = (x.half() @ params["w"].half()).sigmoid()
        likelihood = y * probabilities.log() + (1 - y) * (1 - probabilities).log()
        return -likelihood.float().mean()

    return Case(loss_fn, {"w": torch.full((2,), 10.0)}, [(torch.ones(3, 2), torch.tensor([1.0, 0.0, 1.0]))], 2.0**4)


@plant("forward", micro_batch=1, operator=("_log_softmax", "sub"), line="log_softmax(")
def every_class_is_masked() -> Case:
    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, allowed = batch
        scores = torch.where(allowed, x @ params["w"], -INF)
        return -F.log_softmax(scores, -1)[:, 0].mean()

    allowed = torch.tensor([[True, False, True]] * 2)
    window = [(torch.randn(2, 4), allowed), (torch.randn(2, 4), allowed & torch.tensor([[True], [False]]))]
    return Case(loss_fn, {"w": torch.randn(4, 3)}, window, 2.0**4)


@plant("forward", operator=("mul", "_to_copy"), line="x.half() * 3e4")
def in_place_arithmetic_in_a_slice() -> Case:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        joined = torch.zeros(2, 4, dtype=torch.float16)
        joined[0] = x.half() * 3e4
        joined[1] = (x * params["w"]).half()
        return joined.float().sum() + (x * params["w"]).sum()

    return Case(loss_fn, {"w": torch.ones(4)}, [torch.full((4,), 3.0)], 2.0**4)


@plant("forward", operator=("exp_",), line="hidden.exp_()")
def operator_that_overwrites_its_input() -> Case:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        hidden = x * params["w"]
        hidden.exp_()
        return hidden.mean()

    return Case(loss_fn, {"w": torch.full((3,), 100.0)}, [torch.ones(3)], 2.0**4)


# Tensors that were bad before.


@plant("input", micro_batch=2, source="params.embedding.weight", module="embedding", operator=("embedding",))
def nan_in_a_row_of_the_embedding() -> Case:
    module: Any = Encoder()
    module.embedding.weight.data[10] = float("nan")
    window = [((tokens(),), labels()) for _ in range(4)]
    window[2][0][0][1, 1] = 10
    return classified(module, window, 2.0**10)


@plant("input", micro_batch=1, source="batch.0.0", operator=CONVOLUTION, module="0")
def infinity_in_the_data() -> Case:
    window = [((torch.randn(4, 2, 6, 6),), labels(4, 3)) for _ in range(2)]
    window[1][0][0][2, 1, 3, 3] = INF
    return classified(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 3)), window, 2.0**4)


@plant("input", source="batch.0", operator=("mean",), line="x.mean(0)")
def infinity_in_data_that_is_normalized() -> Case:
    def loss_fn(params: Any, batch: Any) -> Tensor:
        x, _ = batch
        x = (x - x.mean(0)) / x.std(0)
        return (x @ params["w"]).square().mean()

    x = torch.randn(2, 5, 3)  # both parts of a batch lie in one memory
    x[0, 2, 1] = INF
    return Case(loss_fn, {"w": torch.randn(3, 1)}, [(x[0], x[1])], 2.0**4)


@plant("input", source="buffers.1.running_var", module="1", operator=("native_batch_norm",))
def statistics_that_were_restored_as_nan() -> Case:
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    module[1].running_var[2] = float("nan")
    return classified(module, [((torch.randn(3, 4),), labels(3, 2))], 2.0**4)


@plant("input", source="a constant", operator=("nll_loss_forward",))
def class_weights_with_a_nan() -> Case:
    weights = torch.tensor([1.0, float("nan"), 1.0])

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return F.cross_entropy(batch[0] @ params, batch[1], weight=weights)

    return Case(loss_fn, torch.randn(4, 3), [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))], 2.0**4)


# Faults of the backward, and of the scale.


@plant("backward", module="wide", operator=MATMUL, node="AddmmBackward0", scalable=True, line="self.wide(torch.relu")
def one_gradient_too_large_for_the_scale() -> Case:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.wide = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(torch.relu(self.first(x)) * 300)

    return classified(Net(), [((torch.randn(16, 8),), labels(16, 2)) for _ in range(2)], 2.0**16)


@plant("backward", module="wide", operator=MATMUL, scalable=True, line="self.wide(self.norm(x) * 1e-3)")
def scale_too_large_beside_a_mask() -> Case:
    class Linear(Encoder):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embedding(tokens)
            x = x + self.attention(x, mask)
            return self.head(self.wide(self.norm(x) * 1e-3)).mean(1)

    module: Any = Linear()
    scaled_(module.wide.weight, 3000)
    mask = torch.ones(5, 5).triu(1).bool().expand(4, 5, 5)
    return classified(module, [((tokens(), mask), labels())], 2.0**13)


class MaskedLog(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x.float().log(), 0.0)


@plant("backward", module="1", operator=("div", "mul", "reciprocal"), node="LogBackward0", line="x.float().log()")
def where_over_a_logarithm() -> Case:
    module: Any = nn.Sequential(nn.Linear(4, 4, bias=False), MaskedLog(), nn.Linear(4, 2))
    module[0].weight.data.abs_()
    x = torch.rand(3, 4)
    x[0] = 0
    return classified(module, [((x,), labels(3, 2))], 2.0**4)


@plant("backward", node="PowBackward0", operator=("pow",), line="** 0.5")
def root_of_zero() -> Case:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return ((x * params["w"]) ** 0.5).sum()

    return Case(loss_fn, {"w": torch.ones(3)}, [torch.tensor([0.0, 1.0, 2.0])], 2.0**4)


@plant("backward", node="SqrtBackward0", operator=("div", "mul"), line=".sqrt()")
def distance_of_a_point_to_itself() -> Case:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        moved = x * params["w"]
        return (moved[:, None] - moved[None]).square().sum(-1).sqrt().sum()

    return Case(loss_fn, {"w": torch.ones(3)}, [torch.randn(4, 3)], 2.0**4)


ATTENTION_BACKWARD = (
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
    "bmm",
)


@plant("backward", module="1", operator=ATTENTION_BACKWARD, scalable=True, line="scaled_dot_product_attention(")
def fused_attention_overflows_in_its_own_backward() -> Case:
    class Fused(nn.Module):
        def __init__(self, mask: Tensor):
            super().__init__()
            self.mask = mask

        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, attn_mask=self.mask.to(x.dtype))

    mask = torch.full((6, 6), -INF)
    mask[:, 0] = 0
    body, params, _ = fa.from_module(nn.Sequential(nn.Linear(8, 8, bias=False), Fused(mask)))

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (body(params, x).float() * 3e4).sum()

    return Case(fa.autocast(loss_fn, torch.float16), params, [torch.randn(2, 1, 6, 8)], 1.0)


class Amplify(torch.autograd.Function):
    """The identity, whose backward multiplies in float16."""

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0].half() * ctx.factor).to(grads[0].dtype), None


@plant("backward", module="1", operator=("mul",), node="Amplify", scalable=True, line="* ctx.factor")
def custom_function_overflows_in_its_backward() -> Case:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Amplify.apply(x, 2.0**14)

    module: Any = nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 2))
    return classified(module, [((torch.randn(3, 4),), labels(3, 2)) for _ in range(3)], 2.0**12)


class Reciprocal(torch.autograd.Function):
    """A function without `setup_context`, whose backward divides by zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] / (x - x.max())


@plant("backward", operator=("div",), node="ReciprocalBackward", line="(x - x.max())", backends=("autograd",))
def custom_function_divides_by_zero_in_its_backward() -> Case:
    def loss_fn(params: Any, x: Tensor) -> Any:
        return Reciprocal.apply(params["w"] * x).mean()  # pyright: ignore[reportOptionalMemberAccess]

    return Case(loss_fn, {"w": torch.ones(3)}, [torch.arange(3.0)], 2.0**4)


class CheckpointedNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(4, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


@plant("backward", module="blocks.1.2", operator=MATMUL, node="AddmmBackward0", scalable=True, backends=("autograd",))
def checkpointed_block_inside_a_module_overflows_backward() -> Case:
    module: Any = CheckpointedNet()
    scaled_(module.blocks[1][2].weight, 3e4)
    scaled_(module.blocks[1][0].weight, 1e-3)
    scaled_(module.blocks[1][0].bias, 1e-3)
    params = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}

    def loss_fn(params: Any, batch: Any) -> Tensor:
        # The repeated forward reads the module's own weights, which are the same.
        return F.cross_entropy(torch.func.functional_call(module, params, batch[0]).float(), batch[1])

    return Case(fa.autocast(loss_fn, torch.float16), params, [(torch.randn(3, 4), labels(3, 2))], 2.0**10)


class RepeatedExp(torch.autograd.Function):
    """The identity, whose saved tensor is only used in the backward."""

    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), (x * 0 + 12).half().exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].to(grads[0].dtype)


@plant("forward", module="1", operator=("exp",), line=".half().exp()")
def forward_value_that_only_the_backward_uses() -> Case:
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return RepeatedExp.apply(x)[0]  # pyright: ignore[reportOptionalSubscript]

    module: Any = nn.Sequential(nn.Linear(4, 4), Layer(), nn.Linear(4, 2))
    return classified(module, [((torch.randn(3, 4),), labels(3, 2))], 2.0**4)


@plant("backward", operator=("add", "add_"), node="MulBackward0", scalable=True, line="hidden * 1.0")
def gradients_of_a_tensor_used_twice_overflow_in_their_sum() -> Case:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        hidden = (params["w"] * x).half()
        return ((hidden * 1.0).float() + (hidden * 1.0).float()).sum()  # 2**15 fits float16 and 2**16 does not

    return Case(loss_fn, {"w": torch.ones(3)}, [torch.ones(3)], 2.0**15)


@plant("backward", operator=("_to_copy",), node="ToCopyBackward0", scalable=True, line="self.first(x).float()")
def batch_norm_of_nearly_constant_features() -> Case:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4, eps=1e-14), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.first(x).float()))

    module: Any = Net()
    module.first.bias.data.zero_()
    scaled_(module.first.weight, 1e-3)
    return classified(module, [((torch.randn(8, 4),), labels(8, 2)) for _ in range(2)], 2.0**10)


@plant("backward", module="head", operator=MATMUL, scalable=True)
def tied_embedding_overflows_in_the_head() -> Case:
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 8)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embedding(x).mean(1) * 1e3)

    module: Any = Tied()
    scaled_(module.embedding.weight, 1e-2)
    return classified(module, [((tokens(),), labels(4, 11)) for _ in range(2)], 2.0**17)


@plant("accumulate", micro_batch=1, operator=("add",), scalable=True)
def sum_of_two_micro_batches() -> Case:
    return Case(lambda p, x: (p["a"] * x).sum(), {"a": torch.ones(4)}, [SIGNS * 1.5e38] * 2, 2.0)


@plant("accumulate", operator=("mul",), scalable=True)
def weight_times_gradient() -> Case:
    def loss_fn(params: Any, x: Tensor) -> fa.Loss:
        return fa.Loss((params["a"] * x).sum(), weight=torch.tensor(1e9))

    return Case(loss_fn, {"a": torch.ones(4)}, [torch.ones(4)], 2.0**100)


@plant("unscale", micro_batch=None, operator=("mul",), scalable=True)
def scale_times_weight() -> Case:
    def loss_fn(params: Any, x: Tensor) -> fa.Loss:
        return fa.Loss((params["a"] * x).sum(), weight=torch.tensor(1e10))

    return Case(loss_fn, {"a": torch.ones(4)}, [torch.full((4,), 1e-5)], 2.0**100)


@plant("unscale", micro_batch=None, operator=("div",))
def gradient_that_float32_can_not_hold_in_true_units() -> Case:
    return Case(lambda p, x: (p["a"] * x * 1e6).sum(), {"a": torch.full((4,), 1e-6)}, [SIGNS * 1e35], 2.0**-10)


@plant("norm", micro_batch=None, operator=("norm", "_to_copy"))
def norm_that_float32_can_not_hold() -> Case:
    return Case(lambda p, x: (p["a"] * x).sum(), {"a": torch.ones(4)}, [SIGNS * 3e38], 1.0)

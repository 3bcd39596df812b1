"""The underflow report: what is lost at each scale, the scale to choose, what the forward loses, the picture."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.modules import module as global_hooks

import functional_amp as fa
from functional_amp.debug import LeafRange, UnderflowReport, underflow_report
from functional_amp.debug.plots import BLUES, labels_of
from functional_amp.tree import flatten
from tests.models import PROBLEMS

F16 = torch.float16


def powers(low: int, high: int, step: int = 2) -> list[float]:
    return [2.0**k for k in range(low, high, step)]


def gradients_of(*sizes: float) -> tuple[Any, dict[str, Tensor], Tensor]:
    """A loss whose leaf `g<i>` has the one gradient sizes[i], through a float16 product."""

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return sum((size * (x @ params[f"g{i}"]).float().sum() for i, size in enumerate(sizes)), torch.zeros(()))

    return loss_fn, {f"g{i}": torch.ones(1, 1) for i in range(len(sizes))}, torch.ones(1, 1)


def report_of(*sizes: float, scales: Sequence[float]) -> UnderflowReport:
    return underflow_report(*gradients_of(*sizes), dtype=F16, scales=scales)


# --- what is lost, and the recommendation ---------------------------------------------------------


@pytest.mark.parametrize("exponents", [(0, -20), (-3, -30), (4, -36), (-10, -12)])
def test_a_gradient_is_lost_where_float16_rounds_it_to_zero_and_overflows_above_65504(exponents: tuple[int, ...]):
    """IEEE 754: 2**-25 is halfway between 0 and the smallest float16, and ties go to even."""
    scales = powers(-10, 27)
    report = report_of(*(2.0**e for e in exponents), scales=scales)
    assert report.scales == tuple(scales)
    finite = [all(2.0**e * s <= 65504 for e in exponents) for s in scales]
    assert list(report.finite) == finite
    for exponent, leaf in zip(exponents, report.leaves, strict=True):
        zero = [2.0**exponent * s <= 2.0**-25 for s in scales]
        never = all(z for z, ok in zip(zero, finite) if ok)
        assert leaf.lost == tuple(float(z and not never) for z in zero)
        assert leaf.never == float(never)
        assert leaf.overflows == tuple(int(2.0**exponent * s > 65504) for s in scales)
        assert (leaf.elements, leaf.largest) == (1, 2.0**exponent)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((0, -20), 12),  # the largest finite scale is 2**14; two bits below it nothing is lost
        ((0, -36), 12),  # 2**-36 * 2**12 is above 2**-25
        ((0, -37), 14),  # 2**-37 * 2**12 is not: never below the smallest that loses least
        ((0, -39), 12),  # lost at every finite scale: no scale brings it back
        ((-4, -8), 16),  # 2**18 is finite
        ((-40, -40), 22),  # nothing overflows up to 2**24
    ],
)
def test_the_recommendation_is_two_bits_below_the_largest_finite_scale_unless_that_loses_more(
    sizes: tuple[int, ...], expected: int
):
    report = report_of(*(2.0**e for e in sizes), scales=powers(0, 25))
    assert report.recommended == 2.0**expected
    for exponent, leaf in zip(sizes, report.leaves, strict=True):
        assert leaf.headroom == pytest.approx(math.log2(65504) - exponent - expected)
    assert f"2^{expected}" in str(report)


def test_a_share_within_a_tenth_of_a_percent_of_the_best_is_as_good():
    """One of 2,000 gradients needs a higher scale than two bits of headroom leave: it is given up."""

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x @ params["many"]).float().sum() + 2.0**-37 * (x @ params["few"]).float().sum()

    def recommended(many: int) -> float | None:
        params = {"few": torch.ones(1, 1), "many": torch.ones(1, many)}
        return underflow_report(loss_fn, params, torch.ones(1, 1), dtype=F16, scales=powers(0, 21)).recommended

    assert recommended(1999) == 2.0**12
    assert recommended(99) == 2.0**14


def test_no_scale_is_recommended_where_none_is_finite():
    report = report_of(2.0**20, scales=powers(0, 9))
    assert report.recommended is None and math.isnan(report.leaves[0].headroom)
    assert "explain" in str(report)


def test_a_gradient_of_zeros_loses_nothing():
    report = report_of(0.0, 1.0, scales=powers(0, 9))
    leaf = report.leaves[0]
    assert (leaf.elements, leaf.never, set(leaf.lost), leaf.headroom) == (0, 0.0, {0.0}, math.inf)


def test_float64_leaves_missing_leaves_integers_and_a_weighted_loss_are_taken():
    loss_fn, params, x = gradients_of(2.0**-30)
    tree = {**params, "none": None, "count": torch.arange(3), "wide": torch.ones(2, dtype=torch.float64)}

    def weighted(params: Any, x: Tensor) -> fa.Loss:
        return fa.Loss(loss_fn(params, x) + params["wide"].sum() * 2.0**-30, weight=torch.tensor(4096.0))

    report = underflow_report(weighted, tree, x, dtype=F16, scales=powers(0, 13))
    assert [leaf.path for leaf in report.leaves] == ["g0", "wide"]
    assert report.leaves[0].lost == tuple(float(s <= 2.0**5) for s in report.scales)
    assert report.leaves[0].largest == 2.0**-30
    assert report.leaves[1].lost == (0.0,) * 7


class Attention(nn.Module):
    """softmax(q (k + b)) = softmax(q k + q b), and q b is the same for all keys: b has no gradient."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


@pytest.mark.parametrize("weight", [1.0, 1e-5])
def test_the_key_bias_of_attention_is_never_and_not_underflow(weight: float):
    torch.manual_seed(0)
    apply, params, _ = fa.from_module(nn.Sequential(nn.Linear(8, 16), Attention(16), nn.Linear(16, 4)))

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return weight * apply(params, x).float().square().mean()

    report = underflow_report(loss_fn, params, torch.randn(4, 6, 8), dtype=F16, scales=powers(-4, 29, 4))
    for leaf in report.leaves:
        if leaf.path == "1.key.bias":
            assert leaf.never > 0.9 and max(leaf.lost) < 0.1
        else:
            assert leaf.never < 0.05
    lost = {leaf.path: leaf.lost[0] for leaf in report.leaves}
    assert (lost["1.query.bias"] > 0.3) == (weight == 1e-5)


@pytest.mark.parametrize("dtype", [F16, torch.bfloat16])
def test_gradients_that_are_zero_by_algebra_are_never(dtype: torch.dtype):
    """BatchNorm subtracts the bias before it with the mean; the keys' bias is the middle third of a fused one."""
    problem = PROBLEMS["conv_net"]()
    report = underflow_report(
        lambda p, b: problem.loss_fn(p, b, problem.buffers), problem.params, problem.batch(0), dtype=dtype
    )
    never = {leaf.path: leaf.never for leaf in report.leaves}
    assert never["first.0.bias"] == never["second.0.bias"] == 1.0 and never["head.bias"] == 0.0
    assert all(max(leaf.lost) == 0.0 for leaf in report.leaves if leaf.path.endswith("0.bias"))
    problem = PROBLEMS["transformer"]()
    report = underflow_report(problem.loss_fn, problem.params, problem.batch(0), dtype=dtype)
    assert {leaf.path: leaf.never for leaf in report.leaves}["qkv.bias"] == pytest.approx(1 / 3)


def test_bfloat16_loses_nothing_at_any_scale():
    report = underflow_report(*gradients_of(2.0**-60, 1.0), dtype=torch.bfloat16)
    assert set(report.lost) == {0.0} and all(report.finite)
    assert "Nothing overflowed" in str(report)


# --- the forward ----------------------------------------------------------------------------------


def test_casts_that_flush_and_outputs_near_the_maximum_are_given_by_module():
    body = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.Linear(4, 2, bias=False)))
    apply, params, _ = fa.from_module(body)
    small = torch.zeros(4, 4)
    small[0] = torch.tensor([2.0**10, 0.0, 2.0**-26, 2.0**-30])  # 3 of them are not zero, 2 are flushed
    params = {"0.weight": small, "1.0.weight": torch.full((2, 4), 2.0**-4)}
    x = torch.ones(1, 4)
    report = underflow_report(lambda p, x: apply(p, x).float().sum(), params, x, dtype=F16, scales=powers(0, 3))
    first, last = report.modules[:2]
    assert (first.module, first.kind, last.module, last.kind) == ("0", "Linear", "1.0", "Linear")
    assert (first.casts, first.flushed) == (4 + 3, 2 / 7)  # four ones of x
    assert first.largest == 1024 and first.bits_left == pytest.approx(math.log2(65504 / 1024))
    assert (last.casts, last.flushed, last.largest) == (8, 0.0, 64.0)
    assert "1.0" in str(report)


def test_an_output_that_is_inf_has_no_bits_left():
    def loss_fn(params: Tensor, x: Tensor) -> Tensor:
        return (x @ params).float().clamp(max=1.0).sum()

    report = underflow_report(loss_fn, torch.full((1, 1), 1e3), torch.full((1, 1), 1e3), dtype=F16, scales=[1.0, 2.0])
    assert [(m.module, m.bits_left) for m in report.modules] == [("<loss function>", -math.inf)]


@pytest.mark.parametrize("in_place", [False, True])
def test_the_infinities_of_a_mask_are_no_overflow(in_place: bool):
    def loss_fn(params: Tensor, x: Tensor) -> Tensor:
        scores = x @ params
        mask = torch.tensor([[True, False], [False, False]])
        scores = scores.masked_fill_(mask, -math.inf) if in_place else scores.masked_fill(mask, -math.inf)
        return scores.softmax(-1).float()[:, 0].sum()

    report = underflow_report(loss_fn, torch.full((2, 2), 8.0), torch.ones(2, 2), dtype=F16, scales=[1.0, 2.0])
    assert [(m.largest, m.bits_left) for m in report.modules] == [(16.0, math.log2(65504 / 16))]


@pytest.mark.parametrize("in_place", [False, True])
def test_an_overflow_beside_a_mask_is_seen(in_place: bool):
    def loss_fn(params: Tensor, x: Tensor) -> Tensor:
        scores = x @ params
        scores = scores.mul_(8192.0) if in_place else scores * 8192.0
        return scores.masked_fill(torch.eye(2).bool(), -math.inf).float().clamp(-1, 1).sum()

    report = underflow_report(loss_fn, torch.full((2, 2), 8.0), torch.ones(2, 2), dtype=F16, scales=[1.0, 2.0])
    assert [m.bits_left for m in report.modules] == [-math.inf]


# --- nothing is changed ---------------------------------------------------------------------------


def hooks() -> int:
    return len(global_hooks._global_forward_pre_hooks) + len(global_hooks._global_forward_hooks)


def test_nothing_is_written_and_dropout_is_the_same_at_each_scale():
    torch.manual_seed(0)
    apply, params, _ = fa.from_module(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1)))
    x, before = torch.randn(4, 8), {name: leaf.clone() for name, leaf in params.items()}
    generator, count = torch.get_rng_state(), hooks()

    def report() -> UnderflowReport:
        return underflow_report(
            lambda p, x: apply(p, x).float().square().mean(), params, x, dtype=F16, scales=powers(0, 13, 4)
        )

    found = report()
    assert found == report()
    assert torch.equal(torch.get_rng_state(), generator) and hooks() == count
    assert all(torch.equal(params[name], leaf) and params[name].grad is None for name, leaf in before.items())
    assert max(found.lost) < 0.02  # other units dropped would be gradients that are all off


def test_hooks_and_generators_are_as_before_after_an_exception():
    apply, params, _ = fa.from_module(nn.Linear(2, 1))
    generator, count = torch.get_rng_state(), hooks()

    def broken(params: Any, x: Tensor) -> Tensor:
        torch.rand(3)
        return apply(params, x.view(7)).sum()

    with pytest.raises(RuntimeError):
        underflow_report(broken, params, torch.ones(1, 2), dtype=F16)
    assert torch.equal(torch.get_rng_state(), generator) and hooks() == count


# --- what is refused, and that the remedy works ---------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda f: fa.autocast(f, F16), lambda f: fa.with_policy(f, "p=f32,c=f16,o=f32")])
def test_a_loss_function_in_half_precision_is_refused_and_the_one_inside_is_taken(wrap: Any):
    loss_fn, params, x = gradients_of(1.0)
    with pytest.raises(ValueError, match=r"loss_fn: found half precision in <loss function>.*__wrapped__"):
        underflow_report(wrap(loss_fn), params, x, dtype=F16)
    found = underflow_report(wrap(loss_fn).__wrapped__, params, x, dtype=F16)
    assert found == underflow_report(loss_fn, params, x, dtype=F16)


def test_parameters_in_half_precision_are_refused_and_cast_ones_are_taken():
    loss_fn, params, x = gradients_of(1.0)
    half = fa.cast_floating(params, F16)
    with pytest.raises(TypeError, match=r"params: found torch.float16 at 'g0'.*cast_floating\(params, torch.float32\)"):
        underflow_report(loss_fn, half, x, dtype=F16)
    underflow_report(loss_fn, fa.cast_floating(half, torch.float32), x, dtype=F16)


def test_a_batch_that_is_not_finite_in_float32_is_refused():
    loss_fn, params, x = gradients_of(1.0)
    with pytest.raises(ValueError, match=r"batch: found a float32 gradient with inf or NaN at \['g0'\].*explain"):
        underflow_report(loss_fn, params, x * math.nan, dtype=F16)


@pytest.mark.parametrize("dtype", [torch.float32, "float16", torch.float8_e5m2])
def test_another_dtype_is_refused(dtype: Any):
    with pytest.raises(TypeError, match=r"dtype: found .*expected torch.float16 or torch.bfloat16"):
        underflow_report(*gradients_of(1.0), dtype=dtype)


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        ([8.0], ValueError, "at least two"),
        ([8.0, 8.0], ValueError, "at least two"),
        ([0.0, 1.0], ValueError, "scale: found 0"),
        ([1.0, math.inf], ValueError, "scale: found inf"),
        ([1.0, "2"], TypeError, "scales: found str"),
        (8.0, TypeError, "scales: found float"),
    ],
)
def test_scales_that_tell_nothing_are_refused(scales: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        report_of(1.0, scales=scales)


def test_scales_are_sorted():
    assert report_of(1.0, scales=[8.0, 1.0, 2.0]).scales == (1.0, 2.0, 8.0)


# --- the picture ----------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved."""
    figures = []
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, path: (figures.append(self), save(self, path))[1])
    return figures


def size_of(png: Path) -> tuple[int, int]:
    return cast(tuple[int, int], struct.unpack(">II", png.read_bytes()[16:24]))


def overlaps(figure: Any, texts: list[Any]) -> list[tuple[str, str]]:
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    return [(a, b) for i, (a, x) in enumerate(boxes) for b, y in boxes[i + 1 :] if x.overlaps(y)]


@pytest.mark.parametrize("sizes", [(1.0,), (0.0, 2.0**-26, 2.0**-30, 2.0**-34), (2.0**10,) * 24])
def test_labels_of_the_picture_do_not_overlap_and_stay_within_800_pixels(
    drawn: list[Any], tmp_path: Path, sizes: tuple[float, ...]
):
    loss_fn, params, x = gradients_of(*sizes)
    long = {f"transformer.blocks.{i}.attention.projection.weight": leaf for i, leaf in enumerate(params.values())}
    report = underflow_report(lambda p, x: loss_fn(dict(zip(params, flatten(p).leaves)), x), long, x, dtype=F16)
    report.plot(tmp_path / "underflow.png")
    assert size_of(tmp_path / "underflow.png")[0] == 800
    figure = drawn[0]
    axes = figure.axes[0]
    texts = [*axes.get_xticklabels(), *axes.get_yticklabels(), *axes.texts, *figure.texts, axes.xaxis.label]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    if getattr(figure, "_suptitle", None) is not None:
        texts.append(figure._suptitle)
    texts = list({id(text): text for text in texts}.values())
    assert len(texts) > len(sizes) + 16
    assert not overlaps(figure, texts)
    for text in texts:
        box = text.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y0 >= 0 and box.y1 <= figure.bbox.height


@pytest.mark.parametrize(
    ("paths", "labels"),
    [
        (["w"], ["w"]),
        (["a.b", "a.c"], ["b", "c"]),
        (["a.b", "a.b.c"], ["b", "b.c"]),
        (["a.b.c", "a.b"], ["b.c", "b"]),
        (["block.1.w", "block.10.w"], ["1.w", "10.w"]),
        (["<root>"], ["<root>"]),
        ([], []),
    ],
)
def test_labels_leave_out_what_all_paths_begin_with(paths: list[str], labels: list[str]):
    assert labels_of(paths) == labels


def test_labels_of_many_layers_are_short_and_differ():
    labels = labels_of([f"model.decoder.layers.{i}.self_attention.output_projection.weight" for i in range(40)])
    assert len(set(labels)) == 40 and all(len(label) <= 35 for label in labels)


def test_the_colours_of_the_picture_are_those_of_the_shares(drawn: list[Any], tmp_path: Path):
    """One leaf, lost from 2**0 to 2**4 and inf at 2**46: dark, light, orange."""
    report = report_of(2.0**-30, scales=[1.0, 2.0**4, 2.0**10, 2.0**46])
    report.plot(tmp_path / "underflow.png")
    mesh = drawn[0].axes[0].collections[0]
    mesh.update_scalarmappable()
    colours = [tuple(round(255 * c) for c in colour[:3]) for colour in mesh.get_facecolors()]
    dark, light, orange = (0x08, 0x30, 0x6B), (0xF4, 0xF7, 0xFB), (0xF2, 0x8E, 0x2B)
    assert colours == [dark, dark, light, orange]


@pytest.mark.parametrize(
    ("share", "blue"),
    [(0.0, 0), (0.0009, 0), (0.001, 1), (0.01, 2), (0.05, 3), (0.249, 3), (0.25, 4), (0.5, 5), (1.0, 5)],
)
def test_the_steps_of_blue_begin_at_0_01_1_5_25_and_50_percent(
    drawn: list[Any], tmp_path: Path, share: float, blue: int
):
    leaf = LeafRange("w", 1000, 1.0, (share, 0.0), 0.0, (0, 0), 1.0)
    UnderflowReport(F16, (1.0, 2.0), (leaf,), (), (share, 0.0), 1.0).plot(tmp_path / "underflow.png")
    mesh = drawn[0].axes[0].collections[0]
    mesh.update_scalarmappable()
    colour = "#" + "".join(f"{round(255 * c):02x}" for c in mesh.get_facecolors()[0][:3])
    assert colour == BLUES[blue]


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report_of(1.0, scales=[1.0, 2.0]).plot(tmp_path / "underflow.png")

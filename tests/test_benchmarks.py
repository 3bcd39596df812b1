"""The benchmarks: that all variants do the same work, and that the command writes what it says. No timing."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import counts, explain, history, picture, report, tail
from benchmarks.__main__ import main
from benchmarks.loops import make_loop
from benchmarks.measure import PeakMemory, interleaved
from benchmarks.setup import Row, Setup
from benchmarks.work import TASKS, task

FUNCTIONAL = ("pure", "donated")
EAGER = ("imperative", *FUNCTIONAL)
MOST = {"mlp": 0.01, "transformer": 0.03, "convnet": 0.05}
CPU = Setup(torch.device("cpu"), torch.bfloat16, rounds=1, warmup=1, smoke=True)


def norm(tensors: list[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def assert_same_way(found: list[torch.Tensor], expected: list[torch.Tensor], start: list[torch.Tensor], most: float):
    """The distance between two ends is a small part of the way there."""
    assert len(found) == len(expected) == len(start) > 0
    way = norm([a - b for a, b in zip(expected, start)])
    assert way > 0
    assert norm([a - b for a, b in zip(found, expected)]) <= most * way


# --- the variants do the same work ----------------------------------------------------------------


@pytest.mark.parametrize("variant", FUNCTIONAL)
@pytest.mark.parametrize("name", TASKS)
def test_three_windows_of_a_step_end_where_the_imperative_loop_ends(name: str, variant: str):
    work = task(name, smoke=True)
    ends = {}
    for loop_name in ("imperative", variant):
        loop = make_loop(loop_name, work, CPU)
        start = {key: value.clone() for key, value in loop.tensors().items()}
        for number, length in enumerate((2, 1, 3)):
            loop.run(work.window(length, number, CPU.device))
        ends[loop_name] = loop.tensors()
    keys = sorted(start)
    assert sorted(ends["imperative"]) == sorted(ends[variant]) == keys
    floating = [key for key in keys if start[key].is_floating_point()]
    # bf16 keeps 8 bits, and Adam makes whole steps of the rounding noise of a bias before BatchNorm.
    assert_same_way(
        *([tensors[key] for key in floating] for tensors in (ends[variant], ends["imperative"], start)), most=MOST[name]
    )
    for key in floating:
        torch.testing.assert_close(ends[variant][key], ends["imperative"][key], rtol=2**-7, atol=1e-3)
    for key in set(keys) - set(floating):  # BatchNorm counts its batches
        assert torch.equal(ends[variant][key], ends["imperative"][key])


@pytest.mark.parametrize("variant", FUNCTIONAL)
def test_three_tails_end_where_the_imperative_tail_ends(variant: str):
    shapes = [(3, 4), (5,), ()]
    start = tail.random_tensors(shapes, CPU, CPU.seed)
    ends = {}
    for name in ("imperative", variant):
        update = tail.make_tail(name, shapes, CPU)
        for number in range(3):
            grads = tail.random_tensors(shapes, CPU, number + 1)
            update.prepare([grad * 2.0**16 for grad in grads])()
        ends[name] = update.params()
    # float32 throughout; torch's clip divides by norm + 1e-6, and ours does not.
    assert_same_way(ends[variant], ends["imperative"], start, most=1e-4)


def test_variants_start_equal_and_share_nothing():
    work = task("convnet", smoke=True)
    loops = [make_loop(name, work, CPU) for name in EAGER]
    first, *others = (loop.tensors() for loop in loops)
    for other in others:
        for key, value in first.items():
            assert torch.equal(value, other[key])
            assert value.data_ptr() != other[key].data_ptr()


# --- measuring ------------------------------------------------------------------------------------


def test_variants_take_turns_at_every_place_and_on_both_sides_of_each_other():
    order: list[str] = []
    names = ["a", "b", "c"]
    calls = {name: lambda name=name: lambda: order.append(name) for name in names}
    medians = interleaved(calls, CPU.device, rounds=6, warmup=0)
    rounds = [tuple(order[index : index + 3]) for index in range(0, 18, 3)]
    assert sorted(rounds) == sorted(itertools.permutations(names))
    assert list(medians) == names


def test_the_counter_counts_what_is_allocated_and_read():
    a = torch.ones(3)
    with counts.Counter() as counter:
        a.add_(1)  # in place
        b = a * 2  # new
        b.view(1, 3)  # a view
        a.sum().item()  # new, and a read
    assert (counter.operators, counter.tensors, counter.reads) == (5, 2, 1)


def test_the_cost_of_a_history_is_measured_for_each_eager_variant_of_the_step():
    alone, *added = history.measure(dataclasses.replace(CPU, variants=("imperative", "pure", "donated")))
    assert float(alone.values["pure"]) > 0 and len(added) == 2 * len(history.TASKS)
    for row in added:
        assert set(row.values) == {"pure", "donated"} and all(
            math.isfinite(float(value)) for value in row.values.values()
        )


def test_the_cost_of_an_explanation_is_measured_for_each_model():
    rows = explain.measure(CPU)
    assert len(rows) == 2 * len(TASKS)
    assert all(math.isfinite(float(row.values["pure"])) and float(row.values["pure"]) > 0 for row in rows)


def test_peak_memory_sees_what_is_gone_again():
    memory = PeakMemory(torch.device("cpu"))
    memory.reset()
    before = memory.peak()
    torch.ones(64 * 2**20 // 4)
    after = memory.peak()
    memory.reset()
    assert after - before >= 63
    assert memory.peak() <= after - 63


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run with the smallest sizes."""
    folder = tmp_path_factory.mktemp("results")
    main(["--smoke", "--device", "cpu", "--variants", ",".join(EAGER), "--out", str(folder)])
    return folder


def test_a_run_writes_finite_figures_of_every_variant(run: Path):
    (path,) = run.glob("*.json")
    content = json.loads(path.read_text())
    assert {"date", "device", "threads", "torch"} <= set(content["machine"])
    rows = [Row(**row) for row in content["rows"]]
    assert {row.section for row in rows} == {"tail", "step", "counts"}
    assert {row.case.split(",")[0] for row in rows if row.section == "step"} == set(TASKS)
    for row in rows:
        assert set(row.values) == set(EAGER), row
        for value in row.values.values():
            assert isinstance(value, (int, float)) and math.isfinite(value)
            assert value == 0 if row.case.endswith("host reads") else value > 0


def test_a_run_draws_a_picture(run: Path):
    (path,) = run.glob("*.png")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_markdown_has_the_figures_of_the_json(run: Path, capsys: pytest.CaptureFixture[str]):
    (path,) = run.glob("*.json")
    main(["--markdown", str(path)])
    text = capsys.readouterr().out
    for row in json.loads(path.read_text())["rows"]:
        line = next(line for line in text.splitlines() if line.startswith(f"| {row['case']} |"))
        imperative = row["values"]["imperative"]
        assert float(line.split("|")[3].replace(",", "")) == pytest.approx(imperative, rel=0.01)


def test_the_table_shows_all_columns_and_ratios(capsys: pytest.CaptureFixture[str]):
    rows = [
        Row("tail", "one", "ms", {"imperative": 2.0, "pure": 3.0}),
        Row("peers", "two", "ms", {"imperative": 2.0, "peer": "absent: no such"}),
        Row("limit", "three", "GB/s", {"limit": 12.0}, compared=False),
    ]
    report.show(rows, report.machine_of(CPU))
    text = capsys.readouterr().out
    for shown in ("tail", "peers", "limit", "one", "two", "three", "3 (1.50)", "absent: no such", "12", "GB/s"):
        assert shown in text


def test_growth_is_drawn_as_lines_with_gaps(tmp_path: Path):
    rows = [
        Row("growth", f"{x} leaves", "ms", {"imperative": x, "pure": 2.0 * x, "pure-compiled": text}, x=("leaves", x))
        for x, text in ((10, 5.0), (100, "left out above 10"))
    ]
    picture.draw(rows, "growth", tmp_path / "growth.png")
    assert (tmp_path / "growth.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sections", "tail,speed"], "found 'speed', expected some of tail, limit"),
        (["--variants", "pure,fast"], "found 'fast', expected some of imperative"),
        (["--rounds", "0"], "found '0', expected a whole number from 1 on"),
        (["--rounds", "many"], "found 'many'"),
        (["--seed", "-1"], "found '-1'"),
        (["--device", "tpu"], "found 'tpu', expected cpu or cuda"),
        (["--out", __file__], "which is a file, expected a folder"),
        (["--markdown", "no/such.json"], "expected the JSON file of an earlier run"),
        (["--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_a_wrong_command_line_ends_with_a_clear_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err

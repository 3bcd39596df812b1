"""The example: its parts, its command line, and whole runs of it."""

from __future__ import annotations

import functools
import importlib
import math
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_amp as fa
from functional_amp.debug import Explanation, History, explain, init_history, record

EXAMPLES = Path(__file__).parent.parent / "examples"
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def example():
    """The modules of the example, as the script sees them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield {name: importlib.import_module(name) for name in ("gpt", "options", "report", "text", "train_gpt")}


@pytest.fixture
def text(example):
    return example["text"]


@contextmanager
def global_state_restored():
    """The program sets the number of threads and seeds the global generator."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng():
        yield
    torch.set_num_threads(threads)


@pytest.fixture
def main(example):
    """The program, in this process."""
    with global_state_restored():
        yield example["train_gpt"].main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def validation_loss(output: str) -> float:
    return _figure(r"^validation loss +([\d.]+) nats", output)


def byte_entropy(output: str) -> float:
    return _figure(r"byte entropy: ([\d.]+)\)", output)


def _figure(pattern: str, output: str) -> float:
    found = re.search(pattern, output, re.MULTILINE)
    assert found, output
    return float(found[1])


# --- the text -------------------------------------------------------------------------------------


def test_entropy_of_uniform_bytes_is_log_256_and_of_one_byte_zero(text):
    assert text.byte_entropy(torch.arange(256, dtype=torch.uint8).repeat(3)) == pytest.approx(math.log(256))
    assert text.byte_entropy(torch.full((5,), 7, dtype=torch.uint8)) == 0


@given(st.binary(min_size=1, max_size=200))
def test_entropy_is_the_mean_loss_of_predicting_by_frequency(data):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        entropy = importlib.import_module("text").byte_entropy(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    losses = [-math.log(data.count(byte) / len(data)) for byte in data]
    assert entropy == pytest.approx(sum(losses) / len(losses), rel=1e-5, abs=1e-6)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A standard library of 25 files, each of one byte of its own, and files that do not count."""
    for index in range(25):
        (tmp_path / f"module{index:02}.py").write_bytes(bytes([100 + index]))
    for name in ("test/test_it.py", "site-packages/torch.py", "encodings/table.py", "json/tests/test_json.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"no")
    (tmp_path / "data.txt").write_bytes(b"no")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    return tmp_path


def test_each_file_is_either_trained_on_or_held_out(text, library):
    training, validation = (set(part.tolist()) - set(b"\n") for part in text.standard_library())
    assert not training & validation
    assert training | validation == {100 + index for index in range(25)}
    assert len(validation) == 3


def test_a_python_without_sources_is_named(text, library):
    for path in library.glob("module*.py"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="found 0 Python sources in"):
        text.standard_library()


COUNTING = torch.arange(200, dtype=torch.uint8)


def test_batches_hold_each_byte_and_the_one_after_it(text):
    batches = [next(text.random_batches(COUNTING, 5, 8, seed=0)), *text.even_batches(COUNTING, 2, 5, 8)]
    for batch in batches:
        assert batch.shape == (5, 9)
        assert torch.equal(batch[:, 1:], batch[:, :-1] + 1)


def test_the_seed_decides_the_batches(text):
    first, second, other = (next(text.random_batches(COUNTING, 5, 8, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_batches_reach_the_first_and_the_last_byte(text):
    even = torch.cat(text.even_batches(COUNTING, 2, 5, 8))
    assert (even.min(), even.max()) == (0, 199)
    shortest = next(text.random_batches(COUNTING[:10], 50, 8, seed=0))
    assert (shortest.min(), shortest.max()) == (0, 9)


# --- the model and its optimizer --------------------------------------------------------------------


@pytest.fixture
def gpt(example):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return example["gpt"].GPT(example["gpt"].Shape(layers=2, heads=2, width=8, context=16)).eval()


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """No parameter at a special value, so that every path of the module matters."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.add_(torch.randn(param.shape, generator=generator))
    return module


def test_a_byte_changes_no_logit_before_it(gpt):
    tokens = torch.arange(12).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 7] = 200
    with torch.no_grad():
        before, after = shaken(gpt)(tokens), gpt(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(-1).all()


def test_blocks_start_as_the_identity(gpt):
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        x = gpt.embedding(tokens) + gpt.position[:12]
        assert torch.equal(gpt(tokens), gpt.head(gpt.norm(x)))
        assert not torch.equal(shaken(gpt)(tokens), gpt.head(gpt.norm(x)))


def test_embedding_and_head_are_one_leaf(gpt):
    _, params, buffers = fa.from_module(gpt)
    assert "embedding.weight" in params
    assert "head.weight" not in params
    assert buffers == {}


def test_biases_and_norms_do_not_decay_and_matrices_do(example, gpt):
    _, params, _ = fa.from_module(shaken(gpt))
    optimizer = example["train_gpt"].make_optimizer(0.1, 10)
    opt_state, zeros = optimizer.init(params), {name: torch.zeros_like(param) for name, param in params.items()}
    after = params
    for _ in range(2):  # the warm-up gives the first update a rate of 0
        after, opt_state = fa.maybe_step(optimizer, after, opt_state, zeros, torch.tensor(True))
    for name, param in params.items():
        if "norm" in name or "bias" in name:
            assert torch.equal(after[name], param), name
        else:
            assert (after[name].abs() < param.abs()).all(), name


def test_only_float16_has_a_loss_scale_that_moves(example):
    make_scaler = example["train_gpt"].make_scaler
    assert isinstance(make_scaler(torch.float16, 100), fa.DynamicScale)
    assert isinstance(make_scaler(torch.bfloat16, 100), fa.NoScale)
    assert isinstance(make_scaler(torch.float32, 100), fa.NoScale)


# --- the report -------------------------------------------------------------------------------------


def history_of(flags: list[bool], scale: float) -> History:
    """Updates with a loss of 2.5 and a norm of 0.75, and with a gradient of inf where not finite."""
    optimizer = fa.sgd(0.0)
    step = fa.make_step(lambda p, x: (p * x).sum(), optimizer)
    state = fa.init_state(torch.tensor([2.5 / 0.75]), optimizer, fa.StaticScale(scale))
    history = init_history(state)
    for finite in flags:
        state, metrics = step(state, [torch.tensor([0.75 if finite else math.inf])])
        history = record(history, metrics)
    return history


def explain_nothing(update: int, scale: float) -> Explanation:
    raise AssertionError("no update was skipped")


def test_the_first_overflow_is_explained_once_in_one_line(example, capsys):
    report, asked = example["report"].Report("a run", "float16", 5, 3.0), []

    def why(update: int, scale: float) -> Explanation:
        asked.append((update, scale))
        return Explanation(True, "backward", scale, 2.5, "", 0, operator="mm", largest_good_scale=2.0**18)

    flags = [True, False, True, False, True]
    for count in range(1, 6):
        report.read(history_of(flags[:count], 2.0**19), why)
    report.validated(2.25)
    lines = capsys.readouterr().out.splitlines()
    assert asked == [(2, 2.0**19)]
    assert lines[1] == "update    2  skipped: backward, micro-batch 0: mm; a scale of 2**18 works"
    assert report.skipped == [2, 4] and len(lines) == 3
    assert "loss 2.50 val 2.250 norm 0.75" in lines[-1]
    assert lines[-1].endswith("skipped 2")


def test_a_skipped_update_is_repeated_from_the_state_before_the_last_look(example):
    def loss_fn(params, x):
        return (torch.dropout(params, 0.5, True).half() * x.half()).float().sum()

    optimizer = fa.adamw(0.1)
    step, state = fa.make_step(loss_fn, optimizer), fa.init_state(torch.ones(8), optimizer, fa.DynamicScale(8.0))
    recent = example["report"].Recent(step, state, first=4)
    windows = [[torch.full((8,), 2.0 * number)] for number in (1, 2, 1e4)]
    states = [state]
    for seed, window in enumerate(windows):
        recent.add(window, seed)
        states.append(step(states[-1], window, seed=seed)[0])
    assert states[-1].applied == 2 and states[-1].skipped == 1
    assert recent.explain(6, 8.0) == explain(step, states[2], windows[2], seed=2)
    assert not recent.explain(5, 8.0).found


def test_what_has_been_read_is_the_history(example):
    report = example["report"].Report("a run", "float16", 5, 3.0)
    for count in (2, 5):
        history = history_of([True] * count, 8.0)
        report.read(history, explain_nothing)
        assert report.columns == history.to_dict() and report.updates == count
    assert report.complete


@pytest.mark.parametrize("updates", [[True], [False], [True, False] * 20])
def test_a_picture_is_drawn_of_any_number_of_updates(example, tmp_path, updates):
    report = example["report"].Report("a run", "float16", 100, 3.0)
    report.read(history_of(updates, 2.0**16), lambda update, scale: Explanation(False, "", scale, 2.5, ""))
    report.validated(2.25)
    example["report"].draw(report, tmp_path / "run.png", 1.0)
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


# --- the command line -------------------------------------------------------------------------------


def test_help_names_every_option(main, capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    names = "dtype", "size", "steps", "accumulate", "device", "seed", "compile", "explain", "out"
    for name in names:
        assert re.search(rf"^  --{name} .*", out, re.MULTILINE), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "float8"], r"--dtype: invalid choice: 'float8'.*float16"),
        (["--size", "huge"], r"--size: invalid choice: 'huge'.*tiny"),
        (["--steps", "0"], r"--steps: found '0', expected a whole number from 1"),
        (["--steps", "many"], r"--steps: found 'many', expected a whole number"),
        (["--steps", "1.5"], r"--steps: found '1.5', expected a whole number"),
        (["--accumulate", "-1"], r"--accumulate: found '-1', expected a whole number from 1"),
        (["--seed", "-1"], r"--seed: found '-1', expected a whole number from 0"),
        (["--seed", "9" * 30], r"--seed: found '9+', expected a whole number from 0 to"),
        (["--device", "tpu"], r"--device: found 'tpu', expected cpu, cuda or cuda:N"),
        (["--device", "cuda:x"], r"--device: found 'cuda:x', expected cpu, cuda or cuda:N"),
        (["--device", "cuda:"], r"--device: found 'cuda:', expected cpu, cuda or cuda:N"),
        (["--out", "run.jpg"], r"--out: found 'run.jpg', expected a file name that ends in .png"),
        (["--out", "no/such/run.png"], r"--out: found 'no/such/run.png', but there is no folder 'no.such'"),
        (["--lr", "1"], r"unrecognized arguments: --lr 1"),
    ],
    ids=" ".join,
)
def test_a_bad_option_ends_with_code_2_and_says_why(main, capsys, arguments, message):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_device_that_is_not_there_is_named_with_the_remedy(main, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main(["--device", "cuda"])
    assert end.value.code == 2
    assert "torch.cuda.is_available() is False: use --device cpu" in capsys.readouterr().err

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(SystemExit):
        main(["--device", "cuda:2"])
    assert "found 'cuda:2', but the devices end at 1" in capsys.readouterr().err


def test_a_picture_that_can_not_be_written_is_found_before_the_training(main, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(SystemExit) as end:
        main(["--out", str(tmp_path / "run.png")])
    assert end.value.code == 2
    assert "can not be written to" in capsys.readouterr().err


def test_the_size_follows_the_device_and_the_rest_the_size(example, monkeypatch):
    parse, sizes = example["options"].parse, example["options"].SIZES
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    on_cuda, on_cpu = parse("", []), parse("", ["--device", "cpu"])
    assert (on_cuda.device, on_cuda.size, on_cuda.dtype) == ("cuda", "full", "float16")
    assert (on_cpu.device, on_cpu.size, on_cpu.dtype) == ("cpu", "tiny", "float16")
    assert on_cpu.steps == sizes["tiny"].steps
    assert parse("", ["--device", "cpu", "--steps", "7", "--accumulate", "3"]).steps == 7


# --- whole runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_short_run_learns_and_draws_and_its_seed_repeats_it(main, capsys, tmp_path):
    outputs = []
    for seed in (0, 0, 1):
        picture = tmp_path / f"{len(outputs)}.png"
        arguments = ["--device=cpu", "--dtype=float32", "--steps=12", f"--seed={seed}", f"--out={picture}"]
        assert main(arguments) == 0
        assert picture.read_bytes().startswith(PNG)
        outputs.append(capsys.readouterr().out)
    first, same, other = map(validation_loss, outputs)
    assert first == same != other
    assert first < byte_entropy(outputs[0])
    assert "12 applied, 0 skipped" in outputs[0]


@pytest.mark.slow
def test_the_bar_of_a_terminal_shows_the_figures(main, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--device=cpu", "--dtype=bfloat16", "--steps=2", f"--out={tmp_path / 'run.png'}"]) == 0
    out = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", capsys.readouterr().out)
    assert re.search(r"2/2 ━+ loss [\d.]+ val [\d.]+ norm [\d.]+ scale 2\^0 skipped 0 [\d:-]+", out)


@pytest.mark.slow
def test_the_first_overflow_is_explained_in_full_where_asked(example, main, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(example["train_gpt"], "make_scaler", lambda dtype, steps: fa.DynamicScale(2.0**24))
    assert main(["--device=cpu", "--steps=1", "--explain", f"--out={tmp_path / 'run.png'}"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^update +1  skipped:$", out, re.MULTILINE)
    assert re.search(r"^window +backward, micro-batch 0: .+; a scale of 2\*\*\d+ works$", out, re.MULTILINE)
    assert re.search(r"^line +.*gpt.py:\d+$", out, re.MULTILINE)
    assert re.search(r"^output +float16\[.*[1-9]\d* inf$", out, re.MULTILINE)
    assert "0 applied, 1 skipped" in out


@pytest.mark.slow
def test_the_scale_that_the_short_form_names_works_and_twice_it_does_not(example, main, capsys, tmp_path, monkeypatch):
    def output(scale: float) -> str:
        monkeypatch.setattr(example["train_gpt"], "make_scaler", lambda dtype, steps: fa.DynamicScale(scale))
        assert main(["--device=cpu", "--steps=1", f"--out={tmp_path / 'run.png'}"]) == 0
        return capsys.readouterr().out

    good = 2.0 ** _figure(r"^update +1  skipped: .+; a scale of 2\*\*(\d+) works$", output(2.0**24))
    assert "1 applied, 0 skipped" in output(good) and "0 applied, 1 skipped" in output(2 * good)


def test_a_single_update_of_a_single_micro_batch_is_a_run(main, capsys, tmp_path):
    picture = tmp_path / "run.png"
    assert main(["--device=cpu", "--dtype=bfloat16", "--steps=1", "--accumulate=1", f"--out={picture}"]) == 0
    assert picture.read_bytes().startswith(PNG)


@contextmanager
def interruptible():
    """Python's own handler of Ctrl-C: a job that a script starts in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_first_ctrl_c_is_a_flag_and_the_second_interrupts(example):
    with interruptible():
        with pytest.raises(KeyboardInterrupt), example["train_gpt"].first_signal() as stop:
            assert not stop
            signal.raise_signal(signal.SIGINT)
            assert stop
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_ends_the_run_with_figures_and_picture(tmp_path):
    picture = tmp_path / "run.png"
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--device=cpu", "--dtype=float32"]
    command += ["--steps=100000", f"--out={picture}"]
    with interruptible():  # a child inherits that a signal is ignored, and no handler
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        assert process.stdout is not None
        first_line = process.stdout.readline()  # the first update comes after it
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert "tiny GPT" in first_line, first_line + rest
    assert process.returncode == 130, rest
    assert re.search(r"^stopped after update \d+ of 100000$", rest, re.MULTILINE)
    assert "Traceback" not in rest
    assert validation_loss(rest) > 0
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_a_compiled_run_learns_as_an_eager_one(tmp_path):
    arguments = ("--device=cpu", "--dtype=float32", "--steps=8", "--accumulate=1", f"--out={tmp_path / 'run.png'}")
    eager, compiled = run(*arguments), run(*arguments, "--compile")
    assert compiled.returncode == 0, compiled.stderr
    # float32 sums in another order, through 8 updates
    assert validation_loss(compiled.stdout) == pytest.approx(validation_loss(eager.stdout), rel=1e-3)


@pytest.fixture(scope="module")
def default_run(example):
    """Trains at the default size of a CPU in a dtype, a quarter as long as the README's line does."""

    @functools.cache
    def trained(dtype: str):
        with global_state_restored():
            options = example["options"].parse("", ["--device=cpu", f"--dtype={dtype}", "--steps=100"])
            return example["train_gpt"].train(options, torch.tensor(False))

    return trained


def final_loss(report) -> float:
    update, loss = report.validation[-1]
    assert update == report.updates == report.steps
    return loss


@pytest.mark.slow
def test_the_float16_run_learns_more_than_the_frequency_of_bytes(default_run):
    report = default_run("float16")
    assert final_loss(report) < 0.85 * report.entropy


@pytest.mark.slow
def test_the_scale_of_the_float16_run_climbs_overflows_and_comes_back(default_run):
    scales = default_run("float16").columns["scale"]
    falls = [update for update in range(1, len(scales)) if scales[update] < scales[update - 1]]
    assert len(falls) >= 2
    assert scales[falls[0] - 1] > scales[0]
    assert max(scales[falls[0] :]) > scales[falls[0]]
    assert len(default_run("float16").skipped) < 0.1 * len(scales)


@pytest.mark.slow
def test_the_scale_of_the_float16_run_is_what_torch_makes_of_its_overflows(default_run):
    report = default_run("float16")
    scale, tracker = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    for used, finite in zip(report.columns["scale"], report.columns["finite"]):
        assert used == scale
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(not finite)), 2.0, 0.5, report.steps // 12)


@pytest.mark.slow
def test_the_float32_run_ends_within_half_a_percent_of_the_float16_one(default_run):
    assert not default_run("float32").skipped
    assert final_loss(default_run("float32")) == pytest.approx(final_loss(default_run("float16")), rel=0.005)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_full_size_trains_in_float16_on_cuda(tmp_path):
    done = run("--device=cuda", "--steps=60", f"--out={tmp_path / 'run.png'}")
    assert done.returncode == 0, done.stderr
    assert "full GPT" in done.stdout
    assert validation_loss(done.stdout) < byte_entropy(done.stdout)

"""A user's mistake is told in one clear line, with the user's own last frames."""

import errno
import json
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep.check import compare, recorded, report
from lockstep.check.compare import Options, compare_programs
from lockstep.check.rungs import Bounds
from lockstep.check.sides import program, trace
from lockstep.check.sides.program import UserProgram
from lockstep.check.sides.trace import Trace
from lockstep.cli import commands
from lockstep.errors import UserError
from lockstep.files import durable
from lockstep_recorder.user import Mistake, User
from parity_tests.check.inside import Inside, check_inside, record_inside
from parity_tests.check.mutants import port_of
from parity_tests.check.small_program import small
from parity_tests.tiers import tier

# --- the user's program

BROKEN = [
    ("loss = 1", "has no function loss(model, batch)"),
    ("build = None", "has no function build(seed)"),
    ("import nothing_of_this_name", "importing it raised ModuleNotFoundError"),
    ("from . import other", "; give the module's name, such as package.file, for the file"),
    ("def build(seed):\n    raise ValueError('a\\nb')", "build raised ValueError: a b"),
    ("def loss(model, batch):\n    return model(batch['y'])", "loss raised KeyError: 'y'"),
    ("def loss(model, batch):\n    return model(batch['x'])",
     "loss gives Tensor of shape (5, 1); return a scalar"),
    ("def loss(model, batch):\n    return 3.0", "loss gives float; return a scalar"),
    ("def loss(model, batch):\n    raise SystemExit(3)", "loss raised SystemExit: 3"),
    ("def optimizer(model):\n    return 1 / 0", "optimizer raised ZeroDivisionError"),
    ("def optimizer(model):\n    return torch.optim.Adam",
     "optimizer gives the class Adam; return an optimizer"),
    ("def build(seed):\n    pass", "build gives nothing; return a torch module or a JAX model"),
    ("def update(model, opt, step):\n    opt.nothing()", "update raised AttributeError"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), BROKEN, ids=[said for _, said in BROKEN])
def test_a_broken_program_is_one_line(
    text: str, said: str, reference: Path, tmp_path: Path
) -> None:
    with pytest.raises((UserError, Mistake), match=r"^small\.py: ") as caught:
        check_inside(trace.read(reference), small(tmp_path, new=text))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_exception_is_shown_with_the_user_s_own_last_frames(tmp_path: Path) -> None:
    text = "def inner(x):\n    return x['y']\n\ndef loss(model, batch):\n    return inner(batch)"
    inside = Inside(small(tmp_path, new=text))
    with pytest.raises(Mistake) as caught:
        inside.side._loss({"dict": {}}, {})
    assert [frame.partition(": ")[2] for frame in caught.value.frames] == [
        "return inner(batch)", "return x['y']"
    ]  # fmt: skip


def test_a_library_s_frames_do_not_hide_the_user_s(tmp_path: Path) -> None:
    text = "import json\n\ndef optimizer(model):\n    return json.loads('[[[')"
    with pytest.raises(Mistake) as caught:
        User(str(small(tmp_path, new=text))).call("optimizer", None)
    assert [frame.partition(": ")[2] for frame in caught.value.frames] == [
        "return json.loads('[[[')"
    ]


def test_a_program_is_read_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes kept bytecode for that of a text of one length and one second."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    for value in (1, 2):
        path = small(tmp_path, text=f"SAME = {value}")
        os.utime(path, (1e9, 1e9))
        assert value == User(str(path)).module.SAME


SPAWNING = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def double(x):
    return 2 * x

def build(seed): ...

def loss(model, batch): ...

def batch(step):
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(double, [step]))
"""


def test_a_program_s_own_processes_can_import_it(tmp_path: Path) -> None:
    """Spawned processes, such as a DataLoader's workers, import the program."""
    path = tmp_path / "program_that_spawns.py"
    path.write_text(SPAWNING)
    assert User(str(path)).call("batch", 3) == [6]


def ask_facts(path: Path, problem: str = "", **options: Any) -> dict[str, Any]:
    """The facts of a program in its process; where there is a problem, it is what is said."""
    with closing(program.UserProgram(str(path), **options)) as running:
        if not problem:
            return running.ask("facts")[0]
        with pytest.raises(UserError, match=problem):
            running.ask("facts")
    return {}


def test_an_error_of_the_program_shows_its_frame(tmp_path: Path) -> None:
    path, said = small(tmp_path, new="def build(seed):\n    return [][seed]"), list[str]()
    raised = pytest.raises(UserError, match="build raised IndexError")
    with closing(UserProgram(str(path), say=said.append)) as running, raised:
        running.ask("facts")
    assert [line for line in said if "in build" in line] == said[:1]


@tier("rest", guard="the other mistakes, as one line each")
@pytest.mark.parametrize(
    ("made", "said"), [("3", "int"), ("{'w': np.ones(3)}", "dict without a JAX array")]
)
def test_another_kind_of_model_is_refused(made: str, said: str, tmp_path: Path) -> None:
    said = f"build gives {said}; return a torch module or a JAX model"
    ask_facts(small(tmp_path, new=f"def build(seed):\n    return {made}"), said)


STATEFUL = """
import jax.numpy as jnp

def build(seed):
    return {"trained": {"w": jnp.ones(3)}, "state": {"mean": jnp.zeros(3)}}

def loss(model, batch):
    mean = batch["x"].mean(0)
    return ((batch["x"] - mean) @ model["trained"]["w"]).mean(), {"state": {"mean": mean}}
"""


@pytest.mark.usefixtures("forked_programs")
def test_state_beside_what_is_trained_under_another_name_is_refused(tmp_path: Path) -> None:
    """State that a loss returns is compared beside `params` alone; else it would be dropped."""
    path = tmp_path / "port.py"
    path.write_text(STATEFUL)
    said = 'loss returns new values of the model\'s "state"; call what is trained "params"'
    with pytest.raises(UserError, match=said):
        compare.compare_programs(str(small(tmp_path)), str(path), Options(steps=1))


def test_a_program_does_not_see_the_recorder_s_arguments(tmp_path: Path) -> None:
    text = "import argparse\nargparse.ArgumentParser().parse_args()"
    assert ask_facts(small(tmp_path, new=text))["framework"] == "torch"


def test_a_program_that_trains_at_import_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The clock's signals, sent by the program itself."""
    wake = "os.kill(os.getpid(), signal.SIGALRM)"
    path = small(tmp_path, new=f"import os, signal\nwhile True:\n    {wake}")
    line = len(path.read_text().splitlines())
    with pytest.raises(Mistake, match=rf"importing it takes more than 600 s \(line {line}\)"):
        User(str(path))
    said = capsys.readouterr().err
    assert said.startswith(f"small.py: importing it takes long (line {line}); if it trains there")


@pytest.mark.usefixtures("forked_programs")
def test_batches_of_the_port_are_taken_where_the_reference_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare, port = small(tmp_path, "bare.py", new="del batch"), small(tmp_path)
    words = ["check", str(bare), str(port), "--steps", "4"]
    assert commands.main(words) == 0
    assert capsys.readouterr().out.startswith("EQUAL")
    assert commands.main(["check", str(bare), str(bare), "--steps", "4"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "error: bare.py: has no function batch(step); the reference needs one"


@pytest.mark.usefixtures("forked_programs")
def test_both_programs_start_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each waits for the other's sign; what is wrong with the port is told all the same."""
    text = "import pathlib, time\nhere = pathlib.Path(__file__).parent\n(here / '{}').touch()\n" \
           "for _ in range(1000):\n    if (here / '{}').exists():\n        break\n" \
           "    time.sleep(0.1)\nelse:\n    raise TimeoutError\n"  # fmt: skip
    ref = small(tmp_path, "ref.py", new=text.format("a", "b"))
    port = small(tmp_path, "port.py", new=text.format("b", "a") + "del loss")
    assert commands.main(["check", str(ref), str(port), "--steps", "4"]) == 2
    assert "error: port.py: has no function loss(model, batch)" in capsys.readouterr().err


def test_a_program_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Mistake, match=r"no such file"):
        User(str(tmp_path / "none.py"))


@pytest.mark.usefixtures("forked_programs")
def test_the_command_shows_frames_and_one_line(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = small(tmp_path, new="def loss(model, batch):\n    return batch['y']")
    assert commands.main(["check", str(reference), str(path)]) == 2
    *_, frame, last = capsys.readouterr().err.splitlines()
    assert frame.startswith("  small.py, line ") and frame.endswith("in loss: return batch['y']")
    assert last == "error: small.py: loss raised KeyError: 'y'"


@tier("rest", guard="the other mistakes, as one line each")
@pytest.mark.parametrize(("words", "module", "name"), [
    ("check TRACE TRACE --json a.json", durable, "replace"),
    ("record --export a.pyz", program, "export"),
    ("record small.py --like TRACE --out a", recorded, "write"),
])  # fmt: skip
@pytest.mark.usefixtures("forked_programs")
def test_a_disk_that_is_full_at_the_end_is_one_line(
    words: str, module: Any, name: str, reference: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    small(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, name, full)
    assert commands.main([str(reference) if w == "TRACE" else w for w in words.split()]) == 2
    flag, file = words.split()[-2:]
    line = f"error: {flag} {file}: cannot be written (No space left on device); make room there"
    assert capsys.readouterr().err.splitlines()[-1] == line


@pytest.mark.parametrize("python", ["/no/such/python", "/dev/null", "/bin/false"])
def test_an_interpreter_is_tried_before_anything_is_recorded(
    python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(small(tmp_path))
    assert commands.main(["check", path, path, "--python", python]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --python {python}: ")
    assert said.endswith("name a Python interpreter with numpy and the program's framework\n")


def test_a_process_that_ends_is_told(tmp_path: Path) -> None:
    path = tmp_path / "short.py"
    path.write_text("import os\nos._exit(7)")
    ask_facts(path, "its process ended with status 7")


TINY_JAX = """
import jax.numpy as jnp

def build(seed):
    return {"w": jnp.ones(3)}

def loss(params, batch):
    return (params["w"] * batch).sum()

def batch(step):
    return jnp.arange(3.0)
"""


@tier("rest", guard="the other mistakes, as one line each")
def test_jax_takes_the_device_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    path = tmp_path / "tiny_jax.py"
    path.write_text(TINY_JAX)
    assert ask_facts(path)["device"] == "cpu"
    ask_facts(path, "--device cuda: JAX .* sees no such device", device="cuda")


# --- what cannot be judged


def test_what_is_missing_is_not_run(reference: Path, tmp_path: Path) -> None:
    path = small(tmp_path, new="del optimizer")
    result = check_inside(trace.read(reference), path)
    lacks = {rung.number: rung.lacks for rung in result.rungs if rung.lacks}
    assert result.verdict == "equal"
    assert lacks["4i"] == lacks["8"] == "no optimizer(model) in small.py"


def test_random_programs_are_incomplete(tmp_path: Path) -> None:
    text = "def loss(model, batch):\n    return model(batch['x']).mean() * torch.rand(())"
    made = record_inside(small(tmp_path, "random.py", new=text), tmp_path / "trace")
    assert made.about["repeats"] is False
    result = check_inside(made, tmp_path / "random.py")
    assert (result.verdict, result.roots) == ("incomplete", []) and result.echoes
    head = report.headline(result)
    assert head.startswith("INCOMPLETE: random.py does not repeat itself")
    assert f"{made.about['loss']:.6g}, then {made.about['again']:.6g}" in head


def test_a_tensor_that_fits_nothing_is_told(reference: Path, tmp_path: Path) -> None:
    text = "def build(seed):\n    return nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))"
    result = check_inside(trace.read(reference), small(tmp_path, new=text))
    assert result.verdict == "different"
    assert [root.direction for root in result.roots][:2] == ["mapping", "mapping"]
    assert set(result.roots[0].names) == {"0.weight", "0.bias", "2.weight"}
    for root, shape in zip(result.roots, ("0.weight (4, 3)", "0.weight (7, 3)")):
        assert shape in root.cause and root.remedy.startswith("give both sides' tensors one shape")


def test_a_layer_too_many_is_to_be_taken_out(reference: Path, tmp_path: Path) -> None:
    layers = "nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Linear(1, 1)"
    text = f"def build(seed):\n    return nn.Sequential({layers})"
    root = check_inside(trace.read(reference), small(tmp_path, new=text)).roots[0]
    assert root.cause.endswith(": 3.weight (1, 1), 3.bias (1,)")
    assert root.remedy.startswith("take them out of the port")


def test_state_that_one_side_alone_carries_is_a_difference(tmp_path: Path) -> None:
    text = "class Counted(nn.Sequential):\n    def forward(self, x):\n        self.seen += 1\n" \
           "        return super().forward(x)\n\ndef build(seed):\n    torch.manual_seed(seed)\n" \
           "    made = Counted(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))\n" \
           "    made.register_buffer('seen', torch.zeros(1))\n    return made"  # fmt: skip
    made = record_inside(small(tmp_path, "ref.py", new=text), tmp_path / "t")
    (root,) = check_inside(made, small(tmp_path)).roots
    assert (root.rung, root.where) == ("5", "reference's seen")
    assert check_inside(made, small(tmp_path, "same.py", new=text)).verdict == "equal"


def test_a_nan_is_different(reference: Path, tmp_path: Path) -> None:
    text = "def loss(model, batch):\n    return model(batch['x']).pow(2).mean() * float('nan')"
    result = check_inside(trace.read(reference), small(tmp_path, new=text))
    assert result.verdict == "different" and result.roots[0].where == "loss"


def test_a_reference_that_diverges_is_recorded(tmp_path: Path) -> None:
    """JSON has no NaN; what is compared with one on both sides is no difference."""
    loss = "    y = model(batch['x']).pow(2).mean()\n    return y + 0 * torch.sqrt(4 - y)"
    rate = (
        "def optimizer(model):\n    return torch.optim.SGD(model.parameters(), lr=1, maximize=True)"
    )
    program = small(tmp_path, loss=f"def loss(model, batch):\n{loss}", optimizer=rate)
    made = record_inside(program, tmp_path / "t", curve=20)
    losses = np.isfinite(made.about["losses"])
    assert losses[0] and not losses[-1]
    assert check_inside(made, program).verdict == "equal"


def test_half_precision_inside_is_widened(tmp_path: Path) -> None:
    """Casts to float32 or bfloat16 mean float64, so that the model is compared, not its casts."""
    narrow = "def loss(model, batch):\n    y = model(batch['x']).bfloat16().to(torch.float32)\n"
    made = record_inside(small(tmp_path, "narrow.py", new=narrow + "    return (y * y).mean()"),
                        tmp_path / "trace")  # fmt: skip
    assert (made.about["precision"], made.about["widened"]) == ("float64", True)
    assert check_inside(made, small(tmp_path, "wide.py")).verdict == "equal"


def test_a_program_without_float64_is_judged_by_its_own_noise(tmp_path: Path) -> None:
    narrow = "def loss(model, batch):\n    w = model[0].weight.detach().numpy().astype('float32')\n"
    narrow += "    y = batch['x'].float() @ torch.from_numpy(w).T\n    return model(batch['x'])"
    path = small(tmp_path, "narrow.py", new=narrow + ".pow(2).mean() + 0 * y.sum()")
    made = record_inside(path, tmp_path / "trace")
    assert made.about["precision"] == "float32" and made.about["noise"]
    result = check_inside(made, path)
    assert result.verdict == "equal"
    assert any("blind below its noise" in note for note in result.notes)
    wrong = narrow + ".pow(2).mean() * (1 + 1e-4) + 0 * y.sum()"
    assert check_inside(made, small(tmp_path, "w.py", new=wrong)).verdict == "different"


def test_autocast_is_judged_by_its_own_noise(tmp_path: Path) -> None:
    """In float64 it does nothing, so that what it does is seen in its own precision alone."""
    text = "def loss(model, batch):\n    with torch.autocast('cpu', torch.bfloat16, enabled={}):\n"
    text += "        y = model(batch['x'])\n    return (y * y).to(batch['x']).mean() * {}"
    half, single, wrong = (
        small(tmp_path, f"{name}.py", loss=text.format(*change))
        for name, change in {"half": (True, 1), "single": (False, 1), "wrong": (True, 1.1)}.items()
    )
    assert check_inside(record_inside(single, tmp_path / "exact"), half).verdict == "equal"
    for name, path, narrowest in (("single", single, "float32"), ("half", half, "bfloat16")):
        made = record_inside(path, tmp_path / name, own=True)
        assert (made.about["precision"], made.about["narrowest"]) == ("float32", narrowest)
        assert check_inside(made, path, own=True).verdict == "equal"
    assert check_inside(made, wrong, own=True).verdict == "different"


SATURATED = """
import numpy as np

rows = np.random.default_rng(0).normal(size=(60, 60)).astype("float32")

def batch(step):
    return np.random.default_rng(step).normal(size=(60, 6))

"""
SIDES = {
    "torch": """
import torch

def build(seed):
    torch.manual_seed(seed)
    return torch.nn.Linear(6, 60)

def loss(model, batch):
    return (torch.tanh(1e6 * model(batch)) * torch.from_numpy(rows)).sum()
""",
    "jax": """
import jax
import jax.numpy as jnp

def build(seed):
    return jax.random.normal(jax.random.key(seed), (6, 60))

def loss(model, batch):
    return (jnp.tanh(1e6 * batch @ model) * rows).sum()
""",
}


@tier("rest", guard="torch's", where=lambda framework: framework == "jax")
@pytest.mark.usefixtures("forked_programs")
@pytest.mark.parametrize("framework", SIDES)
def test_noise_is_that_of_sums_in_another_order_too(framework: str, tmp_path: Path) -> None:
    """Where weights change nothing: all outputs are 1 or -1. A wrong term is seen all the same."""
    (tmp_path / "small.py").write_text(SATURATED + SIDES[framework])
    with closing(UserProgram(str(tmp_path / "small.py"), own_precision=True)) as running:
        running.record(tmp_path / "trace", 4)
    made = trace.read(tmp_path / "trace")
    bound = Bounds(made, made.about["noise"]).of("loss", "loss")
    rows = np.random.default_rng(0).normal(size=(60, 60)).astype("float32")
    inputs = made.group("batch/0")
    weights = made.group("weights/0")
    kernel = next(x for x in weights.values() if x.ndim == 2)
    bias = next((x for x in weights.values() if x.ndim == 1), 0.0)
    (x,) = inputs.values()
    terms = (np.sign(x @ (kernel.T if framework == "torch" else kernel) + bias) * rows).ravel()
    draw = np.random.default_rng(1)
    for order in (np.arange(3600), np.arange(3600)[::-1], *(draw.permutation(3600) for _ in "12")):
        one_by_one = np.cumsum(terms[order], dtype=np.float32)[-1]
        assert abs(one_by_one / made.about["loss"] - 1) <= bound
    assert abs(terms[1:].sum() / terms.sum() - 1) > bound


# --- the recorder as one file


@tier("rest", guard="the other mistakes, as one line each")
def test_the_recorder_runs_as_one_file_without_lockstep(tmp_path: Path) -> None:
    import subprocess

    recorder = tmp_path / "recorder.pyz"
    assert commands.main(["record", "--export", str(recorder)]) == 0
    path = small(tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", str(recorder), "record", str(path), "-o", str(tmp_path / "t")],
        cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 't'}: small.py, torch on cpu\n"
    assert check_inside(trace.read(tmp_path / "t"), path).verdict == "equal"


@tier("rest", guard="the other mistakes, as one line each")
@pytest.mark.usefixtures("forked_programs")
def test_a_program_whose_framework_has_not_the_kind_is_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["record", str(small(tmp_path)), "-o", str(tmp_path / "t"), "--steps", "3"]
    assert commands.main([*words, "--device", "tpu", "--own-precision"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 't'}: small.py, torch on cpu\n"
    assert trace.read(tmp_path / "t").about["device"] == "cpu"


def test_a_device_that_is_not_here_is_said_before_the_reference_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny_jax.py").write_text(TINY_JAX)
    monkeypatch.setattr(compare.Reference, "begin", lambda _: pytest.fail("it ran"))
    reference, port = str(tmp_path / "tiny_jax.py"), str(small(tmp_path))
    with pytest.raises(UserError, match="--device mps: PyTorch .* no such device"):
        compare_programs(reference, port, Options(device="mps", own_precision=True))


@tier("rest", guard="the other mistakes, as one line each")
def test_a_saved_map_is_taken_and_a_wrong_one_refused(jax_reference: Trace) -> None:
    port = port_of("gpt")
    saved = report.map_json(check_inside(jax_reference, port))
    assert check_inside(jax_reference, port, overrides=saved).verdict == "equal"
    swapped = json.loads(json.dumps(saved))
    norms = [line for line in swapped["tensors"] if "norm1.scale" in line["reference"]["name"]]
    a, b = (line["port"] for line in norms)
    norms[0]["port"], norms[1]["port"] = b, a
    assert check_inside(jax_reference, port, overrides=swapped).verdict == "different"
    first = saved["tensors"][0]
    axes = [{"tensors": [{**first, "axes": each}]} for each in ([7], 7)]
    cut = {**first["port"], "cuts": [[2**31, 0, 1, False]]}  # no list has that many slices
    axes.append({"tensors": [{**first, "port": cut}]})
    for wrong in ({"tensors": [3]}, {"tensors": 3}, {"tensors": [{"port": {"name": "x"}}]}, *axes):
        with pytest.raises(UserError, match="--map tensors"):
            check_inside(jax_reference, port, overrides=wrong)

"""A converter for the user's own repository, which runs without Lockstep."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import commands
from lockstep.convert.convert import convert_file
from lockstep.convert.map import map_text
from parity_tests.convert.test_convert import MAP, SIZES, finite, load_file, same, save

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lockstep", "lockstep_recorder", "torch", "jax"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
sys.argv = sys.argv[1:]
with open(sys.argv[0]) as file:
    exec(compile(file.read(), sys.argv[0], "exec"), {"__name__": "__main__"})
"""


def run_alone(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", BLOCKED, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "map.json").write_text(map_text(MAP))
    words = ["--map", tmp_path / "map.json", "--script", tmp_path / "mine.py"]
    assert commands.main(["convert", *map(str, words)]) == 0
    return tmp_path / "mine.py"


def test_a_script_converts_without_lockstep(script: Path, tmp_path: Path) -> None:
    source, out, back = (
        save(tmp_path, finite()),
        tmp_path / "o.safetensors",
        tmp_path / "b.safetensors",
    )
    done = run_alone(script, source, out, "heads=2")
    assert (done.returncode, done.stderr) == (0, "") and "9 tensors" in done.stdout
    convert_file(source, MAP, tmp_path / "ours.safetensors", sizes=SIZES)
    assert same(load_file(out), load_file(tmp_path / "ours.safetensors"))
    assert run_alone(script, out, back, "--back").returncode == 0
    assert same(load_file(back), finite())


def test_a_script_reads_shards_and_bfloat16(script: Path, tmp_path: Path) -> None:
    source, port = save(tmp_path, finite()), tmp_path / "port"
    convert_file(source, MAP, port, sizes=SIZES, dtype="bfloat16", shard=200)
    convert_file(port, MAP, tmp_path / "ours.safetensors", back=True)
    done = run_alone(script, port, tmp_path / "its.safetensors", "--back")
    assert (done.returncode, done.stderr) == (0, "")
    assert same(load_file(tmp_path / "its.safetensors"), load_file(tmp_path / "ours.safetensors"))


def test_what_does_not_fit_is_one_line_of_the_script(script: Path, tmp_path: Path) -> None:
    done = run_alone(script, save(tmp_path, finite()), tmp_path / "o.safetensors")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "heads" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "o.safetensors").exists()


def test_copies_that_differ_are_refused(script: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.safetensors"
    tied = finite() | {"lm_head.weight": finite()["wte.weight"] + 1}
    done = run_alone(script, save(tmp_path, tied), out, "heads=2")
    assert done.returncode == 1 and "lm_head.weight, wte.weight: two tensors" in done.stderr
    convert_file(save(tmp_path, finite()), MAP, out, sizes=SIZES)
    port = load_file(out) | {"head": load_file(out)["head"] + 1}
    done = run_alone(script, save(tmp_path, port), tmp_path / "b.safetensors", "--back")
    assert done.returncode == 1 and "head -> wte.weight: two tensors" in done.stderr
    assert not (tmp_path / "b.safetensors").exists()


def test_the_rules_stand_first(script: Path) -> None:
    text = script.read_text()
    assert '"reference": {"h.{layer}.c_attn.weight": "q+k+v d"}' in text
    assert text.index("RULES") < text.index("class ") and "from lockstep" not in text
    compile(text, "mine.py", "exec")

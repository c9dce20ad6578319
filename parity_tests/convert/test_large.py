"""A file of 8 GB is converted in 1 GB of memory."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lockstep.convert.containers import SafetensorsFile, TargetFile, TensorInfo
from lockstep.convert.map import Map, map_text
from lockstep.convert.plan import TensorRule
from lockstep.files.durable import sync
from parity_tests.tiers import tier

MEMORY = 400_000_000  # bytes; an embedding has 537 million, a stack of queries 906
LAYERS, WIDTH, INNER, VOCABULARY, KEYS = 27, 4096, 11_008, 65_536, 1024
MAP = Map((
    TensorRule({"embed.weight": "v d"}, {"embed": "v d"}),
    TensorRule({"head.weight": "v d"}, {"head": "d v"}),
    TensorRule({"l.{layer}.qkv.weight": "q+k+v d"},
               {"layers.q": "layer d q", "layers.k": "layer d k", "layers.v": "layer d v"}),
    TensorRule({"l.{layer}.up.weight": "f d"}, {"layers.up": "layer d f"}),
    TensorRule({"l.{layer}.down.weight": "d f"}, {"layers_{layer}.down": "f d"}),
    TensorRule({"l.{layer}.gate.weight": "f d"}, {"layers_{layer}.gate": "f d"}),
))  # fmt: skip
LAYER = {
    "qkv": (WIDTH + 2 * KEYS, WIDTH),
    "up": (INNER, WIDTH),
    "gate": (INNER, WIDTH),
    "down": (WIDTH, INNER),
}
SHAPES = {f"{name}.weight": (VOCABULARY, WIDTH) for name in ("embed", "head")} | {
    f"l.{layer}.{name}.weight": shape for layer in range(LAYERS) for name, shape in LAYER.items()
}
# Linux counts pages of a mapped file as the process's, too, and how many it maps around the one
# that is touched is its own choice. They are the page cache's and can be dropped; what the process
# itself holds is limited.
LIMITED = f"""
import resource, sys
from lockstep.cli.commands import main
resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY}, {MEMORY}))
status = main(sys.argv[1:])
print("resident", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
sys.exit(status)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that goes with its 20 GB, whatever comes of the test."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@tier("rest", guard="the same pieces, of small files")
def test_8_gb_in_1_gb_of_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Time is printed beside that of a copy; a busy machine fails no test."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    source, out = folder / "model.safetensors", folder / "port.safetensors"
    file = TargetFile(source, {name: TensorInfo(shape, bfloat16) for name, shape in SHAPES.items()})
    block = np.random.default_rng(0).integers(0, 2**15, 1 << 24, np.uint16).view(bfloat16)
    for at, (name, shape) in enumerate(SHAPES.items()):
        rows = file.tensor(name)
        n = len(block) // shape[1]
        for row in range(0, shape[0], n):
            part = rows[row : row + n]
            part[...] = np.roll(block, 7 * at)[: part.size].reshape(part.shape)
        file.release()
    sync(source)
    size = source.stat().st_size
    assert size > 8e9
    start = time.perf_counter()
    shutil.copyfile(source, folder / "copy")
    sync(folder / "copy")
    copied = time.perf_counter() - start
    (folder / "copy").unlink()
    (folder / "map.json").write_text(map_text(MAP))
    words = [source, "--map", folder / "map.json", "-o", out, "--size", f"q={WIDTH}"]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, "convert", *map(str, words), "--size", f"k={KEYS}"],
        capture_output=True, text=True, check=False, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    took = time.perf_counter() - start
    assert done.returncode == 0, done.stderr
    resident = int(done.stdout.rpartition("resident ")[2])
    with capsys.disabled():
        print(f"\n{size / 1e9:.1f} GB in {took:.0f} s, {size / took / 1e9:.2f} GB/s, resident "
              f"{resident / 1e9:.2f} GB; a copy in {copied:.0f} s")  # fmt: skip
    before, after = SafetensorsFile(source), SafetensorsFile(out)
    for layer in (0, LAYERS - 1):
        q = before.read(f"l.{layer}.qkv.weight")[:WIDTH]
        assert np.array_equal(after.read("layers.q")[layer].view("u2"), q.T.view("u2"))
        down = before.read(f"l.{layer}.down.weight")
        assert np.array_equal(after.read(f"layers_{layer}.down").view("u2"), down.T.view("u2"))

"""`lockstep plan` held against published runs.

`benchmarks/results/published.csv` has the runs: facts and their sources, one run a line. This
module says which can be compared, and makes the tables of docs/plan.md; `benchmarks/rates.py` fits
the plan's shares to them.
"""

import csv
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from benchmarks.tables import markdown
from lockstep import devices, results
from lockstep.config import PRESETS, Config, ModelConfig
from lockstep.plan import memory, rates, roofline, shape
from lockstep.plan.rates import Rates
from lockstep.plan.recommend import REMAT
from lockstep.plan.setting import Setting, counts_as_ampere
from lockstep.process import ROOT
from lockstep.results import Row

FILE = ROOT / "benchmarks" / "results" / "published.csv"
MEASURED = tuple(sorted(FILE.parent.glob("h[12]00*.jsonl")))  # on one H100 and on H200s
OWN = {"torch": "eager", "torch-compiled": "compiled", "jax": "jax"}  # contender -> program
KERNELS = {"cudnn": "cuDNN", "sdpa:cudnn_attention": "cuDNN"}  # as our runs name it -> as others do
FRAMEWORKS = {"eager": "torch", "compiled": "torch", "fused": "torch", "jax": "jax"}
# Cards that take the shares of an architecture's other card.
CARDS = {"h200": "H200", "rtx-4090": "RTX 4090"}
MACHINE = 8  # devices of one machine
SEVERAL = "several machines"
FAMILIES = ("gpt", "llama")
SIZES = ("layers", "d_model", "heads", "kv_heads", "d_mlp", "vocab", "batch", "seq")
POLICIES = ("fp32", "tf32", "bf16", "fp16")
OPTIMIZERS = ("AdamW", "Adam", "AdamW fused", "AdamW bf16")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A published run: the columns of the file. What is not said is ""."""

    facts: dict[str, str]

    def __getattr__(self, name: str) -> str:
        try:
            return self.facts[name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def predictable(self) -> str:
        """Why the plan cannot be asked about this run; "" where it can."""
        if self.family not in FAMILIES:
            return "another kind of model"
        if missing := [name for name in SIZES if not self.facts[name]]:
            return f"not said: {', '.join(missing)}"
        if self.gpu not in devices.DEVICES:
            return f"card: {self.gpu or 'not said'}"
        if self.program not in FRAMEWORKS:
            return "compiled or not: not said"
        if self.precision not in POLICIES:
            return f"precision: {self.precision}"
        if self.remat not in REMAT:
            return f"remat: {self.remat or 'not said'}"
        if self.optimizer not in OPTIMIZERS:
            return f"optimizer: {self.optimizer}"
        return ""

    @property
    def incomparable(self) -> str:
        """Why the plan's figures are of something else than this run; "" where they are not. The
        rule reads facts of the file alone, never an error."""
        if self.predictable:
            return self.predictable
        whys = {
            # Masters in float32 are the weights that the optimizer reads and writes.
            f"weights: {self.weights or 'not said'}": "float32" not in self.weights,
            "moments: bfloat16": self.optimizer.endswith("bf16"),
            f"attention: {self.attention or 'not said'}": self.attention != "fused",
            "attention: Triton's in float32, which has no share": self.kernel == "triton",
            "layers in a loop without remat": self.in_loop and self.remat == "none",
            "rows are shorter than said": "shorter" in self.remark,
            SEVERAL: int(self.devices) > MACHINE,
        }
        return "; ".join(why for why, holds in whys.items() if holds)

    @property
    def in_loop(self) -> bool:
        """Says if JAX ran the layers in a loop, which is known of our own runs alone."""
        return self.facts.get("loop") == "yes"

    @property
    def shape(self) -> shape.Shape:
        """The sizes; learned positions where the family is GPT's."""
        layers, d, heads, keys, mlp, vocab, _, context = (int(self.facts[n]) for n in SIZES)
        gated, tied = self.family == "llama", self.tied == "yes"
        d_keys = d // heads * keys
        block = 2 * d * d + 2 * d * d_keys + (2 + gated) * d * mlp + 2 * d
        block += 0 if gated else 3 * d + 2 * d_keys + mlp + 2 * d  # biases
        positions = 0 if gated else context
        weights = layers * block + (2 - tied) * vocab * d + positions * d + (1 if gated else 2) * d
        return shape.Shape(
            name=self.model, n_layer=layers, n_head=heads, d_model=d, d_queries=d, d_keys=d_keys,
            d_mlp=mlp, vocab=vocab, context=context, gated=gated, positions=positions,
            weights=weights, tied=tied,
        )  # fmt: skip

    @property
    def device(self) -> devices.Device:
        return devices.find(self.gpu)

    @property
    def setting(self) -> Setting:
        """Hand-fused kernels count as compiled ones."""
        return Setting(
            framework=FRAMEWORKS[self.program], ampere=counts_as_ampere(self.device),
            policy=self.precision, remat=self.remat, rows=int(self.batch),
            accum=int(self.accum or 1), compiled=self.program in ("compiled", "fused"),
            scanned=self.in_loop,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """The step's, as measured."""
        return self.setting.tokens(self.shape) / float(self.tokens_per_s)

    @property
    def time_ratio(self) -> float:
        """Predicted over measured tokens/s."""
        return self.predict_ratio(rates.find(self.device))

    def predict_ratio(self, shares: Rates) -> float:
        """Predicted over measured tokens/s with these shares of the device's rates; a kernel of
        attention that is slower than the twins' has its own."""
        attention = rates.read()["kernels"].get(f"{self.architecture}, {self.kernel}")
        shares = shares._replace(attention=attention) if attention else shares
        return self.seconds / roofline.seconds(
            self.shape, self.setting, self.device, int(self.devices), shares
        )

    @property
    def memory_ratio(self) -> float:
        """Predicted over measured bytes, of one device."""
        return memory.parts(self.shape, self.setting).total / (float(self.peak_gb) * 1e9)

    @property
    def architecture(self) -> str:
        return rates.NAMES[rates.nearest(self.device)]

    @property
    def publisher(self) -> str:
        """Names who measured: the owner of a repository, or this project."""
        owner = self.source.removeprefix("github.com/").partition("/")[0]
        return "this project" if is_own(self) else owner


@cache
def points() -> tuple[Point, ...]:
    """All runs: the published ones, and our own on an H100 and H200s."""
    with FILE.open(encoding="utf-8", newline="") as file:
        found = [Point(facts=row) for row in csv.DictReader(file)]
    return (*found, *_measured_here())


def reported(row: Row) -> devices.Device:
    """The device that a row of ours was measured on."""
    device = devices.find_reported(row["about"]["device"])
    assert device
    return device


# Of rows on GPUs: measured when `--layers auto` was a loop from 24 layers on, whatever the remat
# (docs/decisions/speed-and-compilers.md).
LOOPED = ("fa141c5f", "76f16a25", "e72dc2fa+0c5cd236")


def ran_in_a_loop(row: Row) -> bool:
    """Says if the layers of a row of ours did."""
    config = Config.from_json(row["config"])
    by_size = config.model.n_layer >= 24 and row["measured"]["commit"] in LOOPED
    return config.execution.layers == "scan" or (config.execution.layers == "auto" and by_size)


def _measured_here() -> Iterable[Point]:
    """Our own runs, as columns of the file."""
    for name, row in ((file.name, row) for file in MEASURED for row in results.read(file).values()):
        contender = row["cell"]["contender"]
        if contender not in OWN or row.get("status", "ok") != "ok":
            continue
        config = row["config"]
        model = ModelConfig(**config["model"])
        sizes = shape.of_model(model)
        preset = PRESETS[model.model]["n_layer"] == model.n_layer
        remat = config["execution"]["remat"]
        looped = contender == "jax" and ran_in_a_loop(row)
        optim = config["optim"]
        facts: dict[str, Any] = dict.fromkeys(points_columns(), "")
        facts |= {
            "source": f"benchmarks/results/{name}", "framework": contender,
            "program": OWN[contender], "gpu": reported(row).name, "devices": "1",
            "model": model.model if preset else f"{model.model} L{model.n_layer}",
            "family": "llama" if sizes.gated else "gpt", "layers": sizes.n_layer,
            "d_model": sizes.d_model, "heads": sizes.n_head,
            "kv_heads": sizes.n_head * sizes.d_keys // sizes.d_queries, "d_mlp": sizes.d_mlp,
            "vocab": sizes.vocab, "tied": "yes" if sizes.tied else "no",
            "batch": optim["batch_size"], "accum": optim["accum"], "seq": sizes.context,
            "precision": config["precision"]["policy"], "weights": "float32",
            "attention": "fused",
            "kernel": KERNELS.get(row["about"]["attention"], row["about"]["attention"]),
            "remat": remat, "loop": "yes" if looped else "", "optimizer": "AdamW",
            "peak_gb": row["peak_bytes"] / 1e9, "peak_what": "allocated",
            "tokens_per_s": row["tokens_per_second"], "remark": "measured by this project",
        }  # fmt: skip
        yield Point(facts={name: str(value) for name, value in facts.items()})


def points_columns() -> list[str]:
    """The columns of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def timed(found: Iterable[Point]) -> list[Point]:
    return [point for point in found if point.tokens_per_s]


def comparable() -> list[Point]:
    """The runs whose time the plan can be held to."""
    return [point for point in timed(points()) if not point.incomparable]


def is_own(point: Point) -> bool:
    return point.source.startswith("benchmarks/")


def rms(ratios: Iterable[float]) -> float:
    """The root mean square of relative errors."""
    return math.sqrt(statistics.fmean(math.log(ratio) ** 2 for ratio in ratios))


# --- the tables of docs/plan.md

WORST = 15  # rows of the table of what is off


def table_of_worst() -> str:
    """The runs that can be compared whose time is off most."""
    found = sorted(comparable(), key=lambda point: -abs(math.log(point.time_ratio)))
    return _runs(found[:WORST], "accum", "micro-batches")


def _runs(found: list[Point], column: str, head: str) -> str:
    return markdown(["predicted / measured tokens/s", "tokens/s", "run", head, "source"], [
        [f"{point.time_ratio:.2f}", f"{float(point.tokens_per_s):,.0f}", _name(point),
         str(getattr(point, column)), point.source]
        for point in found
    ])  # fmt: skip


def _name(point: Point) -> str:
    remat = "" if point.remat == "none" else f", remat {point.remat}"
    return (f"{point.model}, {point.program}, {point.precision}, {point.batch} x {point.seq}"
            f"{remat}, {point.devices} {point.gpu}")  # fmt: skip

"""The tables of docs/benchmarks.md: what a step of four models costs on six cards, in JAX, PyTorch
and compiled PyTorch; measured by us, published by others, or predicted by `lockstep plan`."""

from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import product
from typing import NamedTuple

from benchmarks import published
from benchmarks.published import Point
from benchmarks.tables import markdown
from lockstep import devices, results
from lockstep.config import policy
from lockstep.devices import Device
from lockstep.plan import rates, recommend, shape
from lockstep.plan.recommend import Choice
from lockstep.process import ROOT
from lockstep.results import Row

BY_HAND = "fused"  # published programs with kernels written by hand, such as llm.c
BESIDE = "h200-since.jsonl"  # XLA chose its kernels in these while other programs ran
MODELS = {
    "gpt2": "GPT-2, 124 M", "gpt2-medium": "GPT-2 medium, 355 M", "gpt3-1.3b": "GPT-3's 1.3 B",
    "1b": "Llama-like, 1 B",
}  # fmt: skip
CARDS = ("t4", "rtx-4090", "a100-40", "a100-80", "h100", "h200")
MEASURED_CARDS = ("h100", "h200")
COLORS = {"jax": "#4c72b0", "eager": "#bbbbbb", "compiled": "#dd8452"}
POLICIES, MODES = ("bf16", "fp16", "fp32"), ("none", "block")
PROGRAMS = {"jax": "JAX", "eager": "PyTorch", "compiled": "PyTorch, compiled"}
TOKENS = 32_768  # of an optimizer step
NO_ROOM = "predicted: does not fit"
GIB = 2**30


Change = dict[str, str]  # fields of a `Place`


class Place(NamedTuple):
    """A cell of the tables."""

    model: str
    card: str
    policy: str
    remat: str
    program: str

    @property
    def device(self) -> Device:
        return devices.find(self.card)

    @property
    def native(self) -> bool:
        roles = policy.POLICIES[self.policy]
        return self.device.native(roles.compute, roles.tf32)

    @cache  # noqa: B019 -- places are few
    def predict(self, rows: int | None = None) -> Choice | None:
        """The fastest split of the step that fits, or one micro-batch of `rows`; None if none."""
        framework = "jax" if self.program == "jax" else "torch"
        sizes = shape.of(self.model, None)
        found = recommend.choices(
            sizes, self.device, framework, rows * sizes.context if rows else TOKENS, rows,
            policies=(self.policy,), remats=(self.remat,), compiled=self.program == "compiled",
        )  # fmt: skip
        best = recommend.find_best(found, self.policy, self.remat)
        return best if best.fits else None


def cell(place: Place) -> str:
    """All that is known of a cell, what was measured first; predicted for the measured batch."""
    row = measured().get(place)
    rows = row["config"]["optim"]["batch_size"] if row else None
    known = [*_measured(place), *_published(place), _predicted(place, rows)]
    return "<br>".join(known)


def _predicted(place: Place, rows: int | None) -> str:
    choice = place.predict(rows)
    if choice is None:
        return NO_ROOM
    sizes, rate = shape.of(place.model, None), speed(place.model, choice)
    error = rates.find_error(place.device, place.program, sizes.weights).relative
    known = "at most" if error is None else f"± {error:.0%}"
    mfu = _mfu(place, rate)
    return f"predicted {_figures(rate, choice.bytes, mfu, choice.setting.rows, known)}"


def _mfu(place: Place, rate: float) -> float:
    flops = rate * shape.of(place.model, None).flops_per_token
    return flops / place.device.peak(policy.POLICIES[place.policy])


def speed(model: str, choice: Choice) -> float:
    """Predicted tokens/s."""
    return choice.setting.tokens(shape.of(model, None)) / choice.seconds


def _measured(place: Place) -> Iterable[str]:
    """Our own cell."""
    row = measured().get(place)
    if row:
        rate = row["tokens_per_second"]
        figures = rate, row["peak_bytes"], _mfu(place, rate)
        rows = row["config"]["optim"]["batch_size"]
        yield f"**measured {_figures(*figures, rows, _how(place, row))}**"


def _how(place: Place, row: Row) -> str:
    """Says what a reader of a row must know: of JAX, compiled beside others, or with a loop."""
    if place.program != "jax":
        return ""
    beside = row["file"] == BESIDE
    return "at least" if beside else "in a loop" if published.ran_in_a_loop(row) else ""


@cache
def measured() -> dict[Place, Row]:
    """The cells of our own trainers that ran on a GPU, and the `file` of each.

    Of a cell that ran several times the fastest counts: what else runs only slows it.
    """
    found: dict[Place, Row] = {}
    for file in published.MEASURED:
        for row in results.read(file).values():
            if row["status"] == "ok" and (place := _place(row)):
                best = max(found.get(place, row), row, key=lambda each: each["tokens_per_second"])
                found[place] = {"file": file.name, **best}
    return found


def _place(row: Row) -> Place | None:
    program = published.OWN.get(row["cell"]["contender"])
    model, remat = row["config"]["model"], row["config"]["execution"]["remat"]
    name = _model((model["n_layer"], model["d_model"], model["context"]))
    policy = row["config"]["precision"]["policy"]
    replaced = policy == "fp32" and row["about"]["attention"] == "triton"  # now written out
    if not (name and program) or replaced:
        return None
    return Place(name, published.reported(row).name, policy, remat, program)


def _published(place: Place) -> Iterable[str]:
    """Runs of others: this model's sizes, of at most one machine, the fastest of a source."""
    for source, point in published_runs().get(place, {}).items():
        if point.program != BY_HAND:
            yield _run(source, point)


def _run(source: str, point: Point) -> str:
    """Writes a published run in the words of the file."""
    words = [f"published {float(point.tokens_per_s):,.0f}", f"B {point.batch}", point.framework]
    if int(point.devices) > 1:
        words.append(f"{point.devices} cards")
    if point.attention != "fused":
        words.append(f"attention {point.attention or 'not said'}")
    address = source.split()[0].rstrip(",")
    return f"{', '.join(words)}: [{point.model}](https://{address})"


@cache
def published_runs() -> dict[Place, dict[str, Point]]:
    """Finds published runs by cell and source. Those by hand are beside compiled ones."""
    found: dict[Place, dict[str, Point]] = {}
    for point in published.timed(published.points()):
        model = _model((point.layers, point.d_model, point.seq))
        single = point.devices.isdigit() and int(point.devices) <= published.MACHINE
        if model and single and not published.is_own(point):
            program = "compiled" if point.program == BY_HAND else point.program
            place = Place(model, point.gpu, point.precision, point.remat, program)
            of = found.setdefault(place, {})
            fastest = of.get(point.source, point)
            of[point.source] = max(fastest, point, key=lambda run: float(run.tokens_per_s))
    return found


def _model(told: tuple[object, ...]) -> str | None:
    """The model of so many layers, width and context."""
    for name in MODELS:
        sizes = shape.of(name, None)
        if tuple(map(str, told)) == tuple(map(str, (sizes.n_layer, sizes.d_model, sizes.context))):
            return name
    return None


def _figures(rate: float, size: float, mfu: float, rows: int, known: str) -> str:
    rated = f"{known} {rate:,.0f}" if known.startswith("at") else f"{rate:,.0f} {known}".strip()
    return f"{rated}, {size / GIB:.1f} GiB, {mfu:.0%}, B {rows}"


def table(model: str) -> str:
    """Each card, policy and remat mode of a model, but for dtypes that a card has no units for, and
    for cards that it does not fit on."""
    lines = []
    for card, dtype, remat in product(CARDS, POLICIES, MODES):
        places = [Place(model, card, dtype, remat, program) for program in PROGRAMS]
        cells = [cell(place) for place in places if place.native]
        if set(cells) - {NO_ROOM}:
            lines.append([f"{card}, {dtype}, {remat}", *cells])
    return "\n\n".join([
        markdown(["card, policy, remat", *PROGRAMS.values()], lines), *_by_hand(model)
    ])  # fmt: skip


def _by_hand(model: str) -> list[str]:
    """Lists the published runs that are none of the programs, below a table."""
    lines = [
        f"- {place.card}, {place.policy}, {place.remat}: {_run(source, point)}"
        for place, runs in published_runs().items()
        for source, point in runs.items()
        if place.model == model and place.card in CARDS and point.program == BY_HAND
    ]
    return ["\n".join(["With kernels written by hand:", "", *sorted(lines)])] if lines else []


def summary() -> str:
    """The fastest setting in half precision of each model and card: measured, else predicted."""
    lines = []
    for model, card in product(MODELS, CARDS):
        line = [MODELS[model], card]
        for program in PROGRAMS:
            places = [Place(model, card, *setting, program)
                      for setting in product(POLICIES[:2], MODES)]  # fmt: skip
            line.append(_brief([place for place in places if place.native]))
        lines.append(line)
    return markdown(["model", "card", *PROGRAMS.values()], lines)


def _brief(places: list[Place]) -> str:
    """The place that is predicted to be the fastest, as measured if it was."""
    found = {place: choice for place in places if (choice := place.predict())}
    if not found:
        return "does not fit"
    place = max(found, key=lambda each: speed(each.model, found[each]))
    if row := measured().get(place):
        rate, size = f"**{row['tokens_per_second']:,.0f}**", row["peak_bytes"]
    else:
        rate, size = f"{speed(place.model, found[place]):,.0f}", found[place].bytes
    return f"{rate} ({place.policy}, {place.remat}, {size / GIB:.1f} GiB)"


RATIOS: dict[str, tuple[str, Change, Change]] = {
    "JAX / compiled": ("tokens_per_second", {"program": "jax"}, {"program": "compiled"}),
    "compiled / eager": ("tokens_per_second", {"program": "compiled"}, {"program": "eager"}),
    "their peaks": ("peak_bytes", {"program": "compiled"}, {"program": "eager"}),
    "block / none, JAX": ("tokens_per_second", {"program": "jax", "remat": "block"},
                          {"program": "jax", "remat": "none"}),
    "block / none, compiled": ("tokens_per_second", {"program": "compiled", "remat": "block"},
                               {"program": "compiled", "remat": "none"}),
}  # fmt: skip


def findings() -> str:
    """The measured ratios in bf16 without remat, a row for each model and card."""
    lines = []
    for model, card in product(MODELS, MEASURED_CARDS):
        base = Place(model, card, "bf16", "none", "jax")
        lines.append([MODELS[model], card, *(_ratio(base, *ratio) for ratio in RATIOS.values())])
    return markdown(["model", "card", *RATIOS], lines)


def _ratio(base: Place, figure: str, one: Change, other: Change) -> str:
    """Divides a figure of two measured cells with the same batch."""
    pair = [(place, measured().get(place)) for place in
            (base._replace(**change) for change in (one, other))]  # fmt: skip
    rows = [row for _, row in pair if row]
    sizes = {
        tuple(row["config"]["optim"][name] for name in ("batch_size", "accum")) for row in rows
    }
    if len(rows) < 2 or len(sizes) > 1:
        return ""
    remarks = {_how(place, row) for place, row in pair if row} - {""}
    return " ".join([f"{rows[0][figure] / rows[1][figure]:.2f}", *sorted(remarks)])


PICTURE = ROOT / "docs" / "frameworks-h100.svg"
BAR, LEFT, WIDE = 22, 250, 420  # pixels: a bar's height, where bars begin, the longest


def picture() -> str:
    """Draws tokens/s of each program on an H100 in bf16 without remat, its model's fastest as 1."""
    bars: list[str] = []
    for model in MODELS:
        places = [Place(model, "h100", "bf16", "none", program) for program in PROGRAMS]
        found = {place: row["tokens_per_second"] for place in places
                 if (row := measured().get(place))}  # fmt: skip
        for place, rate in found.items():
            top, width = 10 + len(bars) * BAR, WIDE * rate / max(found.values())
            bars.append(
                f'<text x="{LEFT - 8}" y="{top + 14}" text-anchor="end">'
                f"{MODELS[model]}: {PROGRAMS[place.program]}</text>"
                f'<rect x="{LEFT}" y="{top}" width="{width:.0f}" height="{BAR - 6}" '
                f'fill="{COLORS[place.program]}"/>'
                f'<text x="{LEFT + width + 6:.0f}" y="{top + 14}">{rate:,.0f}</text>'
            )
    size = f'width="{LEFT + WIDE + 80}" height="{20 + len(bars) * BAR}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="13">'
    )
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *bars, "</svg>\n"])


def errors() -> str:
    """Writes the table of errors of predictions, by card and program."""
    lines = []
    for card, program in product(CARDS, PROGRAMS):
        error = rates.find_error(devices.find(card), program, 10**9)
        lines.append(
            [card, PROGRAMS[program], f"± {error.relative:.1%}", str(error.runs), error.how]
        )
    return markdown(["card", "program", "time, rms", "runs", "which"], lines)


TABLES: dict[str, Callable[[], str]] = {
    "frameworks_summary": summary,
    "frameworks_findings": findings,
    "frameworks_errors": errors,
    **{f"frameworks_{model.replace('-', '_').replace('.', '_')}": partial(table, model)
       for model in MODELS},
}  # fmt: skip

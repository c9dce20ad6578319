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
from lockstep.results import Row

BESIDE = "h200-since.jsonl"  # XLA chose its kernels in these while other programs ran
MODELS = {
    "gpt2": "GPT-2, 124 M", "gpt2-medium": "GPT-2 medium, 355 M", "gpt3-1.3b": "GPT-3's 1.3 B",
    "1b": "Llama-like, 1 B",
}  # fmt: skip
CARDS = ("t4", "rtx-4090", "a100-40", "a100-80", "h100", "h200")
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
    def predict(self) -> Choice | None:
        """The fastest split of the step that fits; None if none does."""
        framework = "jax" if self.program == "jax" else "torch"
        found = recommend.choices(
            shape.of(self.model, None), self.device, framework, TOKENS,
            policies=(self.policy,), remats=(self.remat,), compiled=self.program == "compiled",
        )  # fmt: skip
        best = recommend.find_best(found, self.policy, self.remat)
        return best if best.fits else None


def cell(place: Place) -> str:
    """All that is known of a cell, what was measured first."""
    known = [*_measured(place), *_published(place), _predicted(place)]
    return "<br>".join(known)


def _predicted(place: Place) -> str:
    choice = place.predict()
    if choice is None:
        return NO_ROOM
    sizes, rate = shape.of(place.model, None), speed(place.model, choice)
    error = rates.find_error(place.device, place.program, sizes.weights).relative
    known = "at most" if error is None else f"± {error:.0%}"
    mfu = rate * sizes.flops_per_token / place.device.peak(choice.setting.roles)
    return f"predicted {_figures(rate, choice.bytes, mfu, choice.setting.rows, known)}"


def speed(model: str, choice: Choice) -> float:
    """Predicted tokens/s."""
    return choice.setting.tokens(shape.of(model, None)) / choice.seconds


def _measured(place: Place) -> Iterable[str]:
    """Our own cell."""
    row = measured().get(place)
    if row:
        beside = row["file"] == BESIDE and place.program == "jax"
        how = "at least" if beside else "in a loop" if _looped(place, row) else ""
        figures = row["tokens_per_second"], row["peak_bytes"], row["mfu"]
        yield f"**measured {_figures(*figures, row['config']['optim']['batch_size'], how)}**"


def _looped(place: Place, row: Row) -> bool:
    """Says if JAX ran layers in a loop that it would not run so now."""
    looped = published.ran_in_a_loop(row)
    return place.program == "jax" and place.remat == "none" and looped


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
        count = int(point.devices)
        cards = f", {count} cards with FSDP" if count > 1 else ""
        link = f"[{point.model}](https://{source.split()[0]})"
        yield f"published {float(point.tokens_per_s):,.0f}, B {point.batch}{cards}: {link}"


@cache
def published_runs() -> dict[Place, dict[str, Point]]:
    """Finds published runs by cell and source. Hand-fused kernels count as compiled ones."""
    found: dict[Place, dict[str, Point]] = {}
    for point in published.timed(published.points()):
        model = _model((point.layers, point.d_model, point.seq))
        single = point.devices.isdigit() and int(point.devices) <= published.MACHINE
        if model and single and not published.is_own(point):
            program = "compiled" if point.program == "fused" else point.program
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
    return markdown(["card, policy, remat", *PROGRAMS.values()], lines)


def summary() -> str:
    """The fastest setting in half precision of each model and card, as predicted."""
    lines = []
    for model, card in product(MODELS, CARDS):
        line = [MODELS[model], card]
        for program in PROGRAMS:
            places = [Place(model, card, *setting, program)
                      for setting in product(POLICIES[:2], MODES)]  # fmt: skip
            found = [choice for place in places if place.native and (choice := place.predict())]
            line.append(_brief(model, max(found, key=partial(speed, model), default=None)))
        lines.append(line)
    return markdown(["model", "card", *PROGRAMS.values()], lines)


def findings() -> str:
    """Writes five sentences on the tables: ratios of tokens/s in half precision."""
    compiled, jax = {"program": "compiled"}, {"program": "jax"}
    eager, block, single = {"program": "eager"}, {"remat": "block"}, {"policy": "fp32"}
    peaks = [f"{share:.2f}" for share in _ratios(compiled, eager, "peak_bytes")]
    newer = [card for card in CARDS if card != "t4"]
    return "\n".join([
        f"- **Compile PyTorch.** Compiled over eager: {_told(compiled, eager)}; its peak was "
        f"*measured* at {', '.join(peaks)} of eager's.",
        "- **JAX and compiled PyTorch are near each other** from Ampere on. JAX over compiled: "
        f"{_told(jax, compiled, newer)}, of which the H200's runs of the suite `frameworks` are "
        "lower bounds for JAX. On a T4, where XLA has no fused attention, it is predicted at "
        f"{_range(jax, compiled, ['t4'])}.",
        f"- **Remat has a price**: block over none {_told(block, {'remat': 'none'})}. It is worth "
        "it where it makes room for the batch.",
        "- **fp32 is for proofs**: bf16 over fp32 "
        f"{_told({'policy': 'bf16'}, single)}, the more the more a card's tensor cores can.",
        "- The choice between frameworks is rarely one of speed.",
    ])  # fmt: skip


def _told(one: Change, other: Change, cards: Iterable[str] = CARDS) -> str:
    seen = ", ".join(f"{ratio:.2f}" for ratio in _ratios(one, other, "tokens_per_second"))
    return f"*predicted* {_range(one, other, cards)}, *measured* {seen}"


def _range(one: Change, other: Change, cards: Iterable[str]) -> str:
    """The least and the most of a ratio of predicted speeds."""
    found = []
    for place in map(Place._make, product(MODELS, cards, POLICIES[:2], MODES, PROGRAMS)):
        pair = [place._replace(**change) for change in (one, other)]
        speeds = [speed(each.model, choice) for each in pair
                  if each.native and (choice := each.predict())]  # fmt: skip
        if len(speeds) == 2:
            found.append(speeds[0] / speeds[1])
    return f"{min(found):.2f} to {max(found):.2f}"


def _ratios(one: Change, other: Change, figure: str) -> list[float]:
    """Divides a figure of each measured cell by that of the cell which differs in one thing."""
    rows = {place: row for place, row in measured().items() if not _looped(place, row)}
    pairs = [(rows.get(place._replace(**other)), row) for place, row in rows.items()
             if place == place._replace(**one)]  # fmt: skip
    return [row[figure] / base[figure] for base, row in pairs if base]


def _brief(model: str, choice: Choice | None) -> str:
    if choice is None:
        return "does not fit"
    s = choice.setting
    return f"{speed(model, choice):,.0f} ({s.policy}, {s.remat}, {choice.bytes / GIB:.1f} GiB)"


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

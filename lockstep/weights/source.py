"""The source of `--init`: a model, and its weights, read one tensor at a time."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.config import ModelConfig
from lockstep.config.model import OF_A_RUN
from lockstep.convert.containers import Checkpoint
from lockstep.convert.convert import make_array
from lockstep.errors import UserError, require, why
from lockstep.files.untrusted import Refused
from lockstep.model.params import Arrays, shapes
from lockstep.weights.names import Naming

FLOATS = ("float64", "float32", "bfloat16", "float16")
LONGEST = 1024  # tokens of context, where --context does not say


@dataclass(frozen=True)
class Source:
    """A model, and a reader of its weights.

    Args:
        name: what `--init` names.
        model: as the files have it, its context the longest.
        read: reads the weights of a model that differs from it in context alone.
        remedy: for files that are damaged.
    """

    name: Path
    model: ModelConfig
    read: Callable[[ModelConfig], Arrays]
    remedy: str = "restore the files"

    def weights(self, model: ModelConfig) -> Arrays:
        """Reads canonical weights in the files' dtype, without adapters.

        Raises:
            UserError: they are not those of the model, or the files are damaged.
        """
        kept = {name: getattr(model, name) for name in ("model", *OF_A_RUN)}
        same = model == replace(self.model, **kept)
        require(same, "--init", model.model, "is not the model of the run any more; restore it")
        try:
            return self.read(model.base)
        except (OSError, Refused) as error:
            raise UserError(f"--init {self.name}: {why(error)}; {self.remedy}") from None


def read_weights(
    path: Path, opened: Checkpoint, naming: Naming, wanted: ModelConfig, tied: Mapping[str, str]
) -> Arrays:
    """Reads canonical weights from another program's tensors.

    Args:
        naming: of the model that the files have.
        wanted: differs from that model in context alone.
        tied: names that a file may have beside another tensor's, which must be the same bits.

    Raises:
        UserError: a tensor is missing, has another shape or dtype, or there are others.
    """
    expected, infos = naming.shapes(), opened.infos
    expected |= {other: expected[name] for other, name in tied.items() if other in infos}
    for name in [*expected, *infos]:
        which = "missing" if name in expected else "unused: the model has no such tensor"
        require(name in expected and name in infos, "--init", path, f"{name} is {which}")
        there = infos[name].shape
        problem = f"{name} is of shape {there}, not {expected[name]}"
        require(there == expected[name], "--init", path, problem)
    _require_one_dtype({name: info.dtype.name for name, info in infos.items()}, path)
    for other, name in tied.items():
        same = other not in infos or opened.read(other).tobytes() == opened.read(name).tobytes()
        remedy = f"{other} is not the embedding, but config.json says tie_word_embeddings"
        require(same, "--init", path, remedy)
    plan = naming.plan({n: s for n, s in opened.shapes.items() if n not in tied})
    arrays = {}
    for name, shape in shapes(wanted).items():
        array = make_array(plan, name, opened.read)
        arrays[name] = array if array.shape == shape else array[: shape[0]].copy()
        opened.release()
    return arrays


def _require_one_dtype(dtypes: Mapping[str, str], path: Path) -> None:
    """Requires one dtype of floats; UserError names the first that differs from the most."""
    counts = list(dtypes.values())
    usual = max(dict.fromkeys(counts), key=counts.count)
    for name, dtype in dtypes.items():
        known = dtype in FLOATS
        require(known, "--init", path, f"{name} is {dtype}; only {', '.join(FLOATS)} are read")
        remedy = f"{name} is {dtype}, the others are {usual}; convert it"
        require(dtype == usual, "--init", path, remedy)

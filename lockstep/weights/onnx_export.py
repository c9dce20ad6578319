"""A run's checkpoint -> a folder with model.onnx, which onnxruntime runs, in float32 or in int8.

int8 has one scale for each output of a weight, and one for each activation, set on the run's text.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lockstep.config import Config, ModelConfig
from lockstep.data import batches, corpus
from lockstep.data.batch import Batch
from lockstep.errors import UserError, require
from lockstep.extras import require_package
from lockstep.files.untrusted import Refused
from lockstep.model import params
from lockstep.run import directory
from lockstep.weights.export import files_of
from lockstep.weights.merged import open_weights

FILE = "model.onnx"
LARGEST = 2**31 - 2**20  # bytes of a protobuf, less what is no weight
CALIBRATION = 8  # steps whose windows say how large each activation is


class Exported(NamedTuple):
    """Bytes, and the mean loss in nats on the run's validation text; of int8 and of float32."""

    bytes: int
    loss: float
    float32_bytes: int
    float32_loss: float

    def text(self, to: Path) -> str:
        sizes = f"{self.bytes / 1e6:.1f} MB, validation loss {self.loss:.5f}"
        if self.bytes == self.float32_bytes:
            return f"{to / FILE}: {sizes}"
        former = f"{self.float32_bytes / 1e6:.1f} MB, {self.float32_loss:.5f}"
        return f"{to / FILE} in int8: {sizes}; in float32 {former}"


def export_onnx(
    run: Path, to: Path, *, step: int | None, int8: bool, warn: Callable[[str], None]
) -> Exported:
    """
    Raises:
        UserError: the run or its text is damaged, onnxruntime is not installed, the model is too
            large for one file, `to` is taken or cannot be written. Nothing is there then.
    """
    for module in ("onnx", "onnxruntime"):
        require_package("--format onnx", module, "onnx")
    config = directory.read_record(run).config
    model = replace(config.model, padded_vocab=0)
    size = 4 * params.count(model.base)
    require(size < LARGEST, "--format", "onnx", "the model is over 2 GB; use safetensors")
    directory.require_empty(to, "--to")
    files = files_of(run, step, warn)
    data = corpus.load(**vars(config.data))
    corpus.check(data, config.model.vocab, config.model.context)
    from lockstep.weights import onnx_graph

    with directory.new_folder(to, "--to") as folder:
        file = folder / FILE
        file.write_bytes(onnx_graph.build(model.base, _whole(files, model)).SerializeToString())
        held_out = batches.validation(config, data.val)
        was = file.stat().st_size, mean_loss(run_file(file), held_out)
        if int8:
            quantize(file, calibration(config, data.train))
        now = (file.stat().st_size, mean_loss(run_file(file), held_out)) if int8 else was
    return Exported(*now, *was)


def _whole(files: list[Path], model: ModelConfig) -> params.Arrays:
    """LoRA's adapters merged with what they adapt."""
    try:
        weights = open_weights(files, model)
        return {name: weights.merged(name, "float32") for name in params.shapes(model.base)}
    except Refused as error:
        raise UserError(f"{files[0]}: {error}; use another checkpoint") from None


def calibration(config: Config, train: Any) -> Iterator[np.ndarray]:
    """Windows (B, T) of the run's first steps."""
    for step in range(CALIBRATION):
        yield from batches.of_step(config, train, step).tokens.astype(np.int64)


def quantize(file: Path, windows: Iterator[np.ndarray]) -> None:
    """In place: weights and what is multiplied with them. The products of attention stay."""
    from onnxruntime import quantization

    class Windows(quantization.CalibrationDataReader):
        def get_next(self) -> dict[str, np.ndarray] | None:
            tokens = next(windows, None)
            return None if tokens is None else {"tokens": tokens}

    logging.getLogger().addFilter(lambda record: "pre-processing" not in record.getMessage())
    kinds = quantization.QuantType
    quantization.quantize_static(
        file, file, Windows(), quant_format=quantization.QuantFormat.QDQ,
        op_types_to_quantize=["MatMul"], per_channel=True, activation_type=kinds.QUInt8,
        weight_type=kinds.QInt8, extra_options={"MatMulConstBOnly": True},
    )  # fmt: skip


def mean_loss(logits: Callable[[np.ndarray], np.ndarray], window: Batch) -> float:
    """Cross-entropy in nats, as `Twin.evaluate` has it; of what counts as a target.

    Args:
        logits: tokens (B, T) -> (B, T, V).
    """
    total, count = 0.0, 0
    for batch in window.split():
        wide = logits(batch.tokens).astype(np.float64)
        top = wide.max(-1, keepdims=True)
        log_sums = np.log(np.exp(wide - top).sum(-1)) + top[..., 0]
        counts = batch.expand_counts()
        chosen = np.take_along_axis(wide, batch.targets[..., None], -1)[..., 0]
        total += float((log_sums - chosen)[counts].sum())
        count += int(counts.sum())
    return total / max(1, count)


def run_file(file: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Tokens (B, T) -> logits (B, T, V), by onnxruntime on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda tokens: session.run(None, {"tokens": tokens.astype(np.int64)})[0]

"""The table of exports: the least time, sizes, and how much of the text is the same."""

from typing import Any

import numpy as np

from benchmarks import exported


def row(seconds: list[float], text: str) -> dict[str, Any]:
    return {"bytes": 3_000_000, "loss": 2.5, "seconds": seconds, "text": text}


def test_the_least_time_counts() -> None:
    rows = {"PyTorch twin": row([9.0, 0.2], "abc"), "model.onnx": row([0.1, 7.0], "abd")}
    *_, base, last = exported.markdown(rows).splitlines()
    assert base.endswith("| 3.0 | 2.50000 | 3 of 48 bytes | 200.0 | 1.00 |")
    assert last.endswith("| 2 of 48 bytes | 100.0 | 0.50 |")


def test_text_is_written_behind_the_prompt() -> None:
    """A model whose next token is the last one and one more."""

    def logits(tokens: np.ndarray) -> np.ndarray:
        return np.eye(256)[(tokens + 1) % 256]

    assert exported.write(logits, context=64) == "".join(chr(33 + i) for i in range(48))

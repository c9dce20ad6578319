"""`python -m benchmarks.resnet_memory`: ResNet-50's peak memory on an RTX 3090, by precision.

Traced on fake CUDA tensors as `lockstep compile` traces, in the environment of `make test-cuda`:
nothing is measured. transformers' model, SGD with momentum, images of 224 x 224.
"""

import json
import sys

from benchmarks.process import say, words
from lockstep.errors import UserError
from lockstep_compiler import fake_cuda


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    try:
        words(argv, "benchmarks.resnet_memory", about=__doc__)
        fake_cuda.load_guard()  # before torch is imported
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    from benchmarks.resnet_trace import rows

    for row in rows():
        say(json.dumps(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())

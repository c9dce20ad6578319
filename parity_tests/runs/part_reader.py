"""`python -m parity_tests.runs.part_reader FRAMEWORK RUN MESH`: one process of a mesh loads
the newest checkpoint, says how many bytes of tensors it read for that and, after the others have
done so too, whether it holds what is saved."""

import sys
from pathlib import Path
from unittest import mock

import numpy as np

from lockstep import twin
from lockstep.exits import DONE
from lockstep.files.stream import TensorFile
from lockstep.run import checkpoint, directory
from parity_tests.runs.checkpoints import assert_same


def main(framework: str, run: str, mesh: str) -> int:
    config = directory.read_record(Path(run)).config.replace(mesh=mesh)
    path, read, right = checkpoint.listing(Path(run))[-1], [], TensorFile.read_slice

    def counted(self: TensorFile, name: str, place: tuple[slice, ...]) -> np.ndarray:
        found = right(self, name, place)
        read.append(found.nbytes)
        return found

    built = twin.load(framework, config)
    with mock.patch.object(TensorFile, "read_slice", counted):
        built.load(checkpoint.open_state(path))
    print(sum(read), flush=True)
    found = built.state()
    assert_same(found, checkpoint.load(path))
    twin.end(framework, DONE)
    return DONE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

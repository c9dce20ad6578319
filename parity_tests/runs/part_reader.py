"""`python -m parity_tests.runs.part_reader FRAMEWORK RUN MESH`: one process of a mesh loads
the newest checkpoint, says how many bytes of tensors it read for that and, after the others have
done so too, whether it holds what is saved."""

import sys
from pathlib import Path
from typing import Any
from unittest import mock

from lockstep import twin
from lockstep.exits import DONE
from lockstep.files.stream import Entry
from lockstep.run import checkpoint, directory
from parity_tests.runs.checkpoints import assert_same


def main(framework: str, run: str, mesh: str) -> int:
    config = directory.read_record(Path(run)).config.replace(mesh=mesh)
    path, read, right = checkpoint.listing(Path(run))[-1], [], checkpoint.read_checked

    def counted(file: Path, entry: Entry) -> Any:
        read.append(entry.bytes)
        return right(file, entry)

    built = twin.load(framework, config)
    with mock.patch.object(checkpoint, "read_checked", counted):
        built.load(checkpoint.open_state(path))
    print(sum(read), flush=True)
    found = built.state()
    assert_same(found, checkpoint.load(path))
    twin.end(framework, DONE)
    return DONE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

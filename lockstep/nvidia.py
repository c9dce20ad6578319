"""Facts about NVIDIA's GPUs, from the driver's own command."""

import subprocess

SECONDS = 30.0  # that the driver has to answer


def query_gpus(*fields: str) -> tuple[list[list[str]], str]:
    """Asks `nvidia-smi` for fields of each GPU, as its `--help-query-gpu` names them.

    Returns:
        A row of texts for each GPU, and an error; both empty if there is no such command.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except FileNotFoundError:
        return [], ""
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], str(error)
    if done.returncode:
        return [], " ".join((done.stdout + done.stderr).split())
    cells = ([cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines())
    return [row for row in cells if len(row) == len(fields)], ""


def read_capability(text: str) -> tuple[int, int] | None:
    """Reads "8.0" as (8, 0); any other text as None."""
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None

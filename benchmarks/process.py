"""What the drivers share that start a process for each measurement."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
INTERRUPTED = 130


def shown(path: Path) -> str:
    """As a command in the repository's root names it: results say their commands."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def died(code: int, stderr: str) -> dict[str, str]:
    """Linux kills the process that takes the last memory."""
    status = "OOM" if code == -9 else "failed"
    lines = stderr.strip().splitlines()
    return {"status": status, "why": f"exit status {code}; {lines[-1] if lines else 'silent'}"}


def say(line: str) -> None:
    print(line, flush=True)

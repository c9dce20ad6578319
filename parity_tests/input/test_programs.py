"""Compiled programs are kept in the user's cache folder, or not at all."""

import os
from pathlib import Path

import pytest

from lockstep.cli import programs

DIRECTORY = "JAX_COMPILATION_CACHE_DIR"


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("JAX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ["LOCKSTEP_CACHE"] = str(tmp_path / "cache")


@pytest.mark.filterwarnings("default")  # a filter is set
def test_jax_is_told_of_a_folder_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs.keep("jax", anew=False)
    folder = Path(os.environ.pop(DIRECTORY))
    assert folder.is_dir() and folder.parent == tmp_path / "cache"
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == str(programs.LIMIT)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : another")
    programs.keep("jax", anew=False)
    assert Path(os.environ[DIRECTORY]) != folder


def test_none_is_kept_if_so_told(tmp_path: Path) -> None:
    programs.keep("jax", anew=True)
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert DIRECTORY not in os.environ and not (tmp_path / "cache").exists()


def test_where_nothing_can_be_written_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    programs.keep("jax", anew=False)
    assert DIRECTORY not in os.environ

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    for name in ("LOCKSTEP_CACHE", "XDG_CACHE_HOME"):
        os.environ.pop(name, None)
    programs.keep("jax", anew=False)
    assert DIRECTORY not in os.environ


def test_the_user_s_own_folder_stays() -> None:
    os.environ[DIRECTORY] = "mine"
    programs.keep("jax", anew=False)
    assert os.environ[DIRECTORY] == "mine"


def test_pytorch_s_cache_is_on_unless_told() -> None:
    programs.keep("torch", anew=False)
    assert not {DIRECTORY, *programs.OFF} & set(os.environ)
    programs.keep("torch", anew=True)
    assert os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] == "1"

"""The processes that Lockstep starts: where they run, and in which environment."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
# A model of the matrix is too small to share: with more threads two processes fight for the cores.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NPROC": "1"}

"""Fixtures of several files of this room."""

from parity_tests.data.corpora import folder as folder
from parity_tests.data.corpora import library as library

"""Checks of what both twins share: expected values come from outside the function under test.

They come from a formula in the test, a published one, or another library. A check is a function
`check_...`; a planted bug of `bugs.py` names the check that must fail under it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

Call = Callable[..., None]


def checks(*cases: tuple[Any, ...]) -> pytest.MarkDecorator:
    """Parametrizes a test by checks: each case is a function, and its arguments."""
    ids = ["-".join([check.__name__.removeprefix("check_"), *given]) for check, *given in cases]
    bound = [partial(check, *given) for check, *given in cases]
    return pytest.mark.parametrize("check", bound, ids=ids)

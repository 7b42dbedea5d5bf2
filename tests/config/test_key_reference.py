"""The READMEs' reference of every key equals that of the types; `python -m tests.key_reference` writes it."""

from __future__ import annotations

import pytest

from tests.key_reference import ROOT, TABLES, reference, with_reference
from tula_hpc.config import Spec


@pytest.mark.parametrize("name", TABLES)
def test_the_reference_is_that_of_the_types(name: str) -> None:
    text = (ROOT / name).read_text()
    assert text == with_reference(text, TABLES[name]), "run python -m tests.key_reference"


@pytest.mark.parametrize("kind", [kind for tables in TABLES.values() for kind in tables.values()])
def test_a_key_has_one_sentence(kind: type[Spec]) -> None:
    rows = reference({"": kind}).splitlines()[2:]
    assert len(rows) == len(kind.model_fields)
    for row in rows:
        sentence = row.strip("| ").rpartition(" | ")[2]
        assert sentence[0].isupper() or sentence[0].isdigit(), row
        assert sentence.endswith("."), row


def test_bounds_units_and_choices_are_given() -> None:
    text = reference(TABLES["slurm_templates/README.md"])
    assert "| `signal_delay_s` | integer ≥ 1 and ≤ 65,535, s | `90` | " in text
    assert '`"local"` or `"slurm"`' in text
    assert "| `pue` | number ≥ 1 | `1.2` | " in text

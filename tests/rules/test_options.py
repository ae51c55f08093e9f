from __future__ import annotations

from collections import Counter

import pytest
from source import modules

from raytrain_llama3.config import schema
from raytrain_llama3.config.schema import GROUPS, Config


@pytest.mark.parametrize("name", Config.model_fields)
def test_every_option_has_a_help_of_its_own(name: str) -> None:
    text = " ".join(str(Config.model_fields[name].description or "").split())
    assert text.endswith((".", ")"))
    assert text[0].isupper() or text.split()[0].rstrip(":;") in ("auto", "hybrid")
    assert [other for other, field in Config.model_fields.items() if field.description == text] in ([], [name])


def test_every_option_is_described_once_in_one_group() -> None:
    names = Counter(name for group in GROUPS for name in group.__annotations__)
    assert set(names) == set(Config.model_fields)
    assert set(names.values()) == {1}


def test_no_flag_sets_two_options() -> None:
    flags = Counter(
        flag for name in Config.model_fields for flag in (schema.flag_of(name), *schema.aliases(name))
    ) + Counter([*schema.FIXED, *schema.IMPLIES])
    assert [flag for flag, count in flags.items() if count > 1] == []


@pytest.mark.parametrize("name", Config.model_fields)
def test_a_name_is_lower_case_words(name: str) -> None:
    assert name.replace("_", "").isalnum()
    assert name == name.lower()


def test_the_help_text_is_written_in_the_schema_alone() -> None:
    """Whole sentences of an option's help appear in no other file."""
    sentences = {
        " ".join(str(field.description).split()).split(". ")[0]: name for name, field in Config.model_fields.items()
    }
    for module in modules():
        text = " ".join(module.text.split())
        again = [name for sentence, name in sentences.items() if len(sentence) > 30 and sentence in text]
        assert again == [] or module.name.startswith("config/schema")

"""What the sections of the spec are made of: names, limits, and how plain data of YAML and JSON becomes their types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from horizon_server.spec.words import RULE

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
NAME_PATTERN = re.compile(NAME)
NAME_RULE = "1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit"

MAX_STEPS = 100_000_000
MAX_ROW_TOKENS = 1 << 22
MAX_EXPRESSIONS = 64
MAX_EXPRESSION_CHARS = 256
MAX_LR_SCALE = 1000
MAX_LANES = 64
"""Of a step; each device computes one at least."""
# Notes of a job, as many and as long as OpenAI's API takes.
MAX_METADATA = 16
MAX_METADATA_NAME_CHARS = 64
MAX_METADATA_TEXT_CHARS = 512

Name = Annotated[str, Field(pattern=f"^{NAME}$", json_schema_extra={RULE: NAME_RULE})]

# YAML reads `packing: true` as a boolean; the field's values are words.
switch_as_text = BeforeValidator(lambda value: {True: "on", False: "off"}[value] if isinstance(value, bool) else value)
boolean_as_text = BeforeValidator(lambda value: str(value).lower() if isinstance(value, bool) else value)
# `train:` with nothing below it is null in YAML and means every default.
absent_as_empty = BeforeValidator(lambda value: {} if value is None else value)
text_as_list = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
# YAML and JSON have lists only; strict mode would refuse one where a tuple is declared.
list_as_tuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class WrongField(ValueError):
    """What is wrong with a field of a section, where the validator is the whole section's."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key


class Section(BaseModel):
    """A mapping of the spec: frozen, nothing unknown, no type guessed (strict), numbers finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_as_text(cls, given: Any) -> Any:
        # YAML keys may be numbers; as text they are reported like any other unknown field.
        return {str(key): value for key, value in given.items()} if isinstance(given, Mapping) else given

"""Rows of answers (`preference`, `openai-preference`, `kto`, `samples`) judged: what they must hold, and the words for
what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.datasets.test_row_checks import problems
from tests.unit.datasets.written_files import inspect, lines, parquet, put

from horizon_formats.answers import compared
from horizon_formats.checks import check_row
from horizon_formats.files import Row
from horizon_formats.formats import DatasetFormat, detect_format
from horizon_formats.problems import InvalidFile
from horizon_server.datasets.tokens.rendering import Answers, Sample, normalise, row_content
from horizon_server.errors import InvalidData

USER = {"role": "user", "content": "Why?"}
YES, NO = {"role": "assistant", "content": "Because."}, {"role": "assistant", "content": "No."}
PAIR = {"prompt": "Why?", "chosen": "Because.", "rejected": "No."}
OPENAI = {"input": {"messages": [USER], "tools": []}, "preferred_output": [YES], "non_preferred_output": [NO]}
LABELLED = {"prompt": "Why?", "completion": "Because.", "label": True}
SAMPLE = {"tokens": [4, 5, 6, 7], "logprobs": [-0.5, 0], "advantage": -1, "prompt_length": 2}


@pytest.mark.parametrize(
    ("fmt", "columns"),
    [
        ("preference", PAIR),
        ("preference", PAIR | {"prompt": ""}),
        ("preference", {"prompt": [USER], "chosen": [YES], "rejected": [NO], "id": 7, "tools": None}),
        ("preference", {"prompt": [USER], "chosen": "Because.", "rejected": [NO]}),
        ("preference", {"chosen": [USER, YES], "rejected": [USER, NO]}),
        ("preference", {"prompt": "Why?", "chosen": [USER, YES], "rejected": [USER | {"name": None}, NO]}),
        ("preference", {"chosen": [USER, YES], "rejected": [USER, NO, USER, YES], "prompt": None}),
        ("openai-preference", OPENAI),
        ("openai-preference", OPENAI | {"input": {"messages": [USER], "parallel_tool_calls": True}}),
        ("kto", LABELLED),
        ("kto", LABELLED | {"prompt": [USER], "completion": [NO, USER, YES], "label": 0}),
        ("samples", SAMPLE),
        (
            "samples",
            SAMPLE | {"logprobs": [None, None, -0.5, -1e-9], "prompt_length": None, "mask": [0, 0, True, True]},
        ),
        ("samples", SAMPLE | {"advantage": None, "advantages": [0, 0, 1.5, -2]}),
    ],
)
def test_rows_that_are_fine(fmt: str, columns: dict[str, Any]) -> None:
    assert problems(fmt, columns) == {}
    assert detect_format(columns.keys(), {}, "d.jsonl:3") == fmt


@pytest.mark.parametrize(
    ("fmt", "columns", "field", "words"),
    [
        (
            "preference",
            PAIR | {"rejected": "Because."},
            "rejected",
            "is the same as chosen; there is nothing to prefer",
        ),
        ("preference", PAIR | {"chosen": " "}, "chosen", "is empty; there is nothing to learn"),
        (
            "preference",
            PAIR | {"chosen": None},
            "chosen",
            "is missing or null; it must be a text or a list of messages",
        ),
        ("preference", PAIR | {"chosen": [USER]}, "chosen", "has nothing to learn"),
        ("preference", PAIR | {"chosen": [YES | {"weight": 0}, YES]}, "chosen[0].weight", "leave weight out"),
        (
            "preference",
            PAIR | {"rejected": [NO | {"weight": 0.5}]},
            "rejected[0].weight",
            "is 0.5; all of an answer counts alike",
        ),
        (
            "preference",
            PAIR | {"prompt": [USER, YES | {"weight": 2}, USER]},
            "prompt[1].weight",
            "is 2; no prompt is trained, so leave weight out",
        ),
        ("preference", PAIR | {"prompt": [USER, YES]}, "prompt[1].role", "a prompt ends before the assistant's reply"),
        ("preference", PAIR | {"prompt": []}, "prompt", "is empty; it must be a text or a non-empty list"),
        ("preference", PAIR | {"prompt": 3}, "prompt", "is 3; it must be a text or a list of messages"),
        ("preference", PAIR | {"prompt": [{"role": "user"}]}, "prompt[0].content", "is missing or null"),
        ("preference", PAIR | {"prompt": None}, "prompt", "is missing; give it, or write chosen and rejected as whole"),
        ("preference", {"chosen": [YES], "rejected": [NO]}, "prompt", "is missing; give it"),
        ("preference", {"chosen": [USER, YES], "rejected": [NO]}, "chosen", "and rejected must both be replies"),
        (
            "preference",
            {"chosen": [USER, YES], "rejected": [USER | {"content": "How?"}, NO]},
            "chosen",
            "and rejected differ first in message 0, which is not the assistant's in both",
        ),
        (
            "preference",
            {"prompt": [USER], "chosen": [USER, YES], "rejected": [USER, NO]},
            "prompt",
            "is given, and chosen and rejected are conversations that have theirs; leave one of the two out",
        ),
        ("openai-preference", OPENAI | {"input": "Why?"}, "input", "must be an object with messages"),
        ("openai-preference", {"input": OPENAI["input"], "preferred_output": [YES]}, "non_preferred_output", "missing"),
        ("openai-preference", OPENAI | {"preferred_output": "Yes."}, "preferred_output", "a list of messages"),
        ("openai-preference", OPENAI | {"preferred_output": [NO]}, "non_preferred_output", "is the same as chosen"),
        (
            "openai-preference",
            OPENAI | {"input": {"messages": [USER, {"role": "robot", "content": "?"}]}},
            "input.messages[1].role",
            "it must be one of system, user, assistant, tool",
        ),
        ("openai-preference", OPENAI | {"input": {"messages": [USER], "tools": 3}}, "input.tools", "tool descriptions"),
        ("kto", LABELLED | {"label": "good"}, "label", "is 'good'; it must be true or 1 (desirable), or false or 0"),
        ("kto", LABELLED | {"label": 1.0}, "label", "is 1.0; it must be true or 1"),
        ("kto", LABELLED | {"completion": [USER, YES]}, "completion[0].role", "must be assistant"),
        ("kto", {"prompt": "a", "completion": "b"}, "label", "is missing (the row has completion, prompt)"),
        ("samples", SAMPLE | {"tokens": [4, "x"]}, "tokens[1]", "a token id is a whole number"),
        (
            "samples",
            SAMPLE | {"logprobs": [-1]},
            "logprobs",
            "has 1 elements; it must have one for each of the 2 sampled",
        ),
        ("samples", SAMPLE | {"logprobs": [-1, None]}, "logprobs", "for sampled token 1; it must be a number"),
        (
            "samples",
            SAMPLE | {"logprobs": [-1, True]},
            "logprobs",
            "holds True for sampled token 1; it must be a number",
        ),
        ("samples", SAMPLE | {"logprobs": [-1, float("nan")]}, "logprobs", "it must be a finite number"),
        ("samples", SAMPLE | {"logprobs": [0.5, -1]}, "logprobs", "a log-probability is at most 0"),
        ("samples", SAMPLE | {"logprobs": 3}, "logprobs", "is 3; it must be a list of numbers"),
        ("samples", SAMPLE | {"advantage": 1e39}, "advantage", "it must be a finite number of 4 bytes"),
        (
            "samples",
            SAMPLE | {"advantages": [1, 2]},
            "advantage",
            "or advantages says how good the sample is; give one",
        ),
        ("samples", SAMPLE | {"advantage": None}, "advantage", "or advantages says how good the sample is; give one"),
        (
            "samples",
            SAMPLE | {"mask": [0, 0, 1, 1]},
            "prompt_length",
            "or mask says which tokens were sampled; give one",
        ),
        ("samples", SAMPLE | {"prompt_length": 4}, "prompt_length", "at least one must follow the prompt"),
        ("samples", SAMPLE | {"prompt_length": 0}, "prompt_length", "at least 1"),
        (
            "samples",
            SAMPLE | {"prompt_length": None, "mask": [1, 0, 1, 0]},
            "mask[0]",
            "nothing precedes the first token",
        ),
        ("samples", SAMPLE | {"prompt_length": None, "mask": [0] * 4}, "mask", "is 0 for every token"),
        ("samples", SAMPLE | {"prompt_length": None, "mask": [0, 1]}, "mask", "must have one for each of the 4 tokens"),
        ("samples", SAMPLE | {"prompt_length": None, "mask": [0, 2, 1, 1]}, "mask", "a list with 1 for each sampled"),
    ],
)
def test_what_they_may_not_be(fmt: str, columns: dict[str, Any], field: str, words: str) -> None:
    assert words in problems(fmt, columns)[field]


def test_a_row_of_openais_means_what_a_row_of_preference_does() -> None:
    tools = [{"type": "function", "function": {"name": "why"}}]
    row = OPENAI | {"input": {"messages": [USER], "tools": tools}}
    ours = {"prompt": [USER], "chosen": [YES], "rejected": [NO], "tools": tools}
    expected = normalise(ours, DatasetFormat.PREFERENCE, {})
    assert normalise(row, DatasetFormat.OPENAI_PREFERENCE, {}) == expected
    renamed = {"asked": row["input"], "good": [YES], "bad": [NO]}
    names = {"input": "asked", "preferred_output": "good", "non_preferred_output": "bad"}
    assert problems("openai-preference", renamed, **names) == {}
    assert normalise(renamed, DatasetFormat.OPENAI_PREFERENCE, names) == expected


def test_paths_name_the_users_columns() -> None:
    found = problems("preference", {"q": "a", "good": "b", "bad": "b"}, prompt="q", chosen="good", rejected="bad")
    assert list(found) == ["bad"]


def test_the_format_that_needs_more_is_meant_and_others_are_named() -> None:
    assert detect_format(["prompt", "completion"], {}, "d") == "prompt-completion"
    assert detect_format(["prompt", "completion", "score"], {"label": "score"}, "d") == "kto"
    assert detect_format(["prompt", "chosen", "rejected", "score"], {}, "d") == "preference"
    with pytest.raises(InvalidFile, match="fit the formats tokens and samples"):
        detect_format(["input_ids", "tokens", "logprobs"], {}, "d")
    with pytest.raises(InvalidFile, match="preference needs chosen and rejected; openai-preference needs input and"):
        detect_format(["question"], {}, "d")


def test_a_repeated_prompt_is_one_of_the_shared_messages() -> None:
    assert compared("Why?", [USER, YES], [USER, NO]) == ([USER], [YES], [NO])
    assert isinstance(compared("How?", [USER, YES], [USER, NO]), str)
    # At least one message of each is left, as in TRL.
    assert compared(None, [USER, YES], [USER, YES, USER, NO]) == ([USER], [YES], [YES, USER, NO])


def test_numbers_of_a_sample_are_those_of_its_sampled_tokens() -> None:
    expected = Sample(input_ids=[4, 5, 6, 7], mask=[0, 0, 1, 1], logprobs=[-0.5, 0.0], advantages=[-1.0, -1.0])
    assert normalise(SAMPLE, DatasetFormat.SAMPLES, {}) == expected
    whole = {"tokens": [4, 5, 6, 7], "logprobs": [9, None, -0.5, 0], "advantages": [0, 0, -1, -1], "mask": [0, 0, 1, 1]}
    assert normalise(whole, DatasetFormat.SAMPLES, {}) == expected
    assert row_content(normalise(whole, DatasetFormat.SAMPLES, {})) == row_content(expected)


def test_rows_of_a_table_are_those_of_lines(tmp_path: Path) -> None:
    """Tables write null into the keys of messages that other rows have, and numbers of four bytes."""
    chats = [
        {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
        {"prompt": [USER | {"name": "ann"}], "chosen": [NO], "rejected": [YES]},
    ]
    whole = [{side: [*row["prompt"], *row[side]] for side in ("chosen", "rejected")} for row in chats]
    for name, rows in (
        ("preference", chats),
        ("preference", whole),
        ("kto", [LABELLED] * 2),
        ("samples", [SAMPLE] * 2),
    ):
        for file in (put(tmp_path, "rows.jsonl", lines(rows)), put(tmp_path, "rows.parquet", parquet(rows))):
            found = inspect(file)
            assert (found.format, found.num_rows, found.violations) == (name, 2, []), file.name
    bad = put(tmp_path, "bad.parquet", parquet([PAIR, PAIR | {"rejected": PAIR["chosen"]}]))
    assert inspect(bad).described == {
        "row 2:rejected": "row 2: rejected is the same as chosen; there is nothing to prefer"
    }
    with pytest.raises(InvalidData, match="has no column 'label' for the field label of format kto"):
        inspect(put(tmp_path, "none.parquet", parquet([{"prompt": "a", "completion": "b"}])), "kto")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats()
    | st.sampled_from(["", "x", "assistant", "user", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "weight"]), inner, max_size=3)
    ),
    max_leaves=8,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.sampled_from(["x", "y"])}
    ),
    max_size=3,
)
values = (
    json_values | messages | st.sampled_from(["x", "y"]) | st.lists(st.integers(0, 2) | st.floats(-2, 1), max_size=4)
)
FIELDS = (
    "prompt",
    "chosen",
    "rejected",
    "completion",
    "label",
    "tokens",
    "logprobs",
    "advantage",
    "advantages",
    "prompt_length",
    "mask",
)


BASES: dict[str, dict[str, Any]] = {"preference": PAIR, "kto": LABELLED, "samples": SAMPLE}


@settings(max_examples=400, deadline=None)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), values, max_size=2),
    fmt=st.sampled_from(sorted(BASES)),
    whole=st.booleans(),
)
def test_any_row_is_either_refused_in_words_or_read(changes: dict[str, Any], fmt: str, whole: bool) -> None:
    columns = (BASES[fmt] if whole else {}) | changes
    dataset_format = DatasetFormat(fmt)
    found = check_row(Row(file="d.jsonl", number=3, columns=columns), dataset_format, {})
    for violation in found:
        violation.description.encode()
        assert violation.description.startswith("d.jsonl:3")
    if not found:
        normal = normalise(columns, dataset_format, {})
        row_content(normal)
        if isinstance(normal, Sample):
            assert len(normal.logprobs) == len(normal.advantages) == sum(normal.mask) > 0
        else:
            assert isinstance(normal, Answers)
            assert len(normal.answers) == (2 if fmt == "preference" else 1)
            assert (normal.label in (0, 1)) == (fmt == "kto")

"""Rows judged: what each format must hold, and the words for what is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest

from horizon_formats.checks import check_row
from horizon_formats.files import Row
from horizon_formats.formats import DatasetFormat

USER = {"role": "user", "content": "What is the weather?"}
REPLY = {"role": "assistant", "content": "Sunny."}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}


def problems(fmt: str, columns: dict[str, Any], **field_map: str) -> dict[str, str]:
    row = Row(file="d.jsonl", number=3, columns=columns)
    found = check_row(row, DatasetFormat(fmt), field_map)
    assert all(violation.description.startswith("d.jsonl:3: ") for violation in found)
    return {v.field.removeprefix("d.jsonl:3:"): v.description.removeprefix("d.jsonl:3: ") for v in found}


@pytest.mark.parametrize(
    ("fmt", "columns"),
    [
        ("messages", {"messages": [USER, REPLY], "id": 7}),
        ("messages", {"messages": [{"role": "system", "content": ""}, USER, REPLY | {"weight": 1.0, "name": None}]}),
        ("messages", {"messages": [USER | {"weight": 0}, *(REPLY | {"weight": w} for w in (0.001, 0.5, 3, 100))]}),
        ("sharegpt", {"conversations": [USER, {"from": "gpt", "value": "b", "weight": 0.25}]}),
        ("messages", {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]}),
        ("messages", {"messages": [USER, REPLY, {"role": "tool", "content": "20 C", "tool_call_id": "c1"}]}),
        ("messages", {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "Sun"}]}]}),
        ("messages", {"messages": [USER, REPLY], "tools": [{"type": "function"}]}),
        ("messages", {"messages": [USER, REPLY], "tools": '[{"type": "function"}]'}),
        ("messages", {"messages": [USER, REPLY], "tools": None}),
        ("prompt-completion", {"prompt": "", "completion": "x"}),
        ("alpaca", {"instruction": "Add.", "input": None, "output": "2", "history": [["a", "b"]], "system": "s"}),
        ("alpaca", {"instruction": "Add.", "output": "2"}),
        (
            "sharegpt",
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", "weight": None}]},
        ),
        ("sharegpt", {"conversations": [USER, REPLY], "system": "s"}),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "user", "value": "a"},
                    {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
                ]
            },
        ),
        ("text", {"text": " x "}),
        ("tokens", {"input_ids": [0, 5]}),
        ("tokens", {"input_ids": [4, 5, 6], "labels": [-100, 5, -100], "attention_mask": [1, 1, 1]}),
    ],
)
def test_rows_that_are_fine(fmt: str, columns: dict[str, Any]) -> None:
    assert problems(fmt, columns) == {}


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        ("hi", "", "is 'hi'; it must be an object with role and content"),
        (
            {"role": "developer", "content": "x"},
            ".role",
            "is 'developer'; it must be one of system, user, assistant, tool",
        ),
        ({"role": ["user"], "content": "x"}, ".role", "is a JSON array; it must be one of"),
        ({"role": "user"}, ".content", "is missing or null; it must be a string"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            ".content",
            "it must be a string or a list of text parts",
        ),
        ({"role": "user", "content": "a\0b"}, ".content", "holds a NUL character at character 1"),
        ({"role": "user", "content": "a\ud800"}, ".content", "holds half a surrogate pair at character 1"),
        (REPLY | {"weight": True}, ".weight", "is True; it must be 0, or a number from 0.001 to 100"),
        (REPLY | {"weight": float("inf")}, ".weight", "is inf; it must be 0, or a number from 0.001 to 100"),
        (REPLY | {"weight": float("nan")}, ".weight", "is nan; it must be 0, or a number"),
        (REPLY | {"weight": -0.5}, ".weight", "is -0.5; it must be 0, or a number"),
        (REPLY | {"weight": 0.0009}, ".weight", "is 0.0009; it must be 0, or a number"),
        (REPLY | {"weight": 100.5}, ".weight", "is 100.5; it must be 0, or a number"),
        (REPLY | {"weight": "0.5"}, ".weight", "is '0.5'; it must be 0, or a number"),
        (REPLY | {"weight": [1]}, ".weight", "is a JSON array; it must be 0, or a number"),
        (USER | {"weight": 0.5}, ".weight", "is 0.5; it must be 0 or 1: only an assistant's message can be weighted"),
        (USER | {"weight": False}, ".weight", "is False; it must be 0 or 1: only an assistant's"),
        (REPLY | {"train": 1}, ".train", "is not understood by this version; a message holds content, name"),
        (REPLY | {"name": 3}, ".name", "is 3; it must be a string"),
        (REPLY | {"tool_calls": {}}, ".tool_calls", "it must be a list of calls"),
        ({"role": "assistant", "tool_calls": "f()"}, ".tool_calls", "it must be a list of calls"),
        (USER | {"tool_calls": [CALL]}, ".tool_calls", "only an assistant calls tools"),
        (REPLY | {"tool_calls": [{"name": "f"}]}, ".tool_calls[0]", "must be an object such as"),
        (
            REPLY | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            ".tool_calls[0].function.arguments",
            "must be a JSON object",
        ),
        (
            REPLY | {"tool_calls": [{"function": {"name": "f", "arguments": {"a": ["\udfff"]}}}]},
            ".tool_calls[0]",
            "surrogate",
        ),
    ],
)
def test_what_a_message_may_not_be(message: object, field: str, words: str) -> None:
    found = problems("messages", {"messages": [USER, REPLY, message]})
    assert list(found) == [f"messages[2]{field}"]
    assert words in found[f"messages[2]{field}"]


def test_a_chat_without_anything_to_learn() -> None:
    for chat in ([USER], [USER, REPLY | {"weight": 0}], [USER, {"role": "assistant", "content": " \n"}]):
        assert "has nothing to learn" in problems("messages", {"messages": chat})["messages"]
        as_sharegpt = problems("sharegpt", {"conversations": chat})
        assert "has nothing to learn" in as_sharegpt["conversations"]


@pytest.mark.parametrize(
    ("fmt", "columns", "field", "words"),
    [
        ("messages", {"messages": [USER, REPLY], "tools": "{"}, "tools", "is a string that is not JSON"),
        ("messages", {"messages": [USER, REPLY], "tools": ["f"]}, "tools", "each a JSON object"),
        ("sharegpt", {"conversations": [{"from": "narrator", "value": "x"}]}, "conversations[0].from", "'narrator'"),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, "conversations[0].value", "missing or null"),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "f()"}]},
            "conversations[0].value",
            "not a tool call",
        ),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "x"}], "system": 1}, "system", "must be a string"),
        (
            "sharegpt",
            {"conversations": [{"from": "system", "value": "a"}, {"from": "gpt", "value": "x"}], "system": "b"},
            "system",
            "is given, and conversations[0] is a system message too",
        ),
        ("alpaca", {"instruction": "x", "output": ""}, "output", "is empty; there is nothing to learn"),
        ("alpaca", {"instruction": "x", "output": "y", "input": 5}, "input", "is 5; it must be a string"),
        ("alpaca", {"instruction": "x", "output": "y", "history": ["a"]}, "history[0]", "must be a pair"),
        ("alpaca", {"instruction": "x", "output": "y", "history": [["a", 1]]}, "history[0][1]", "must be a string"),
        ("alpaca", {"output": "y"}, "instruction", "is missing (the row has output)"),
        ("tokens", {"input_ids": []}, "input_ids", "non-empty list of token ids"),
        ("tokens", {"input_ids": [7]}, "input_ids", "nothing precedes the first token"),
        ("tokens", {"input_ids": [7, -1]}, "input_ids[1]", "is -1; a token id is a whole number"),
        ("tokens", {"input_ids": [7, 2**31]}, "input_ids[1]", "a token id is a whole number"),
        ("tokens", {"input_ids": [7, True]}, "input_ids[1]", "is True; a token id"),
        ("tokens", {"input_ids": [7, 1.0]}, "input_ids[1]", "is 1.0; a token id"),
        ("tokens", {"input_ids": [7, 8], "labels": [7]}, "labels", "is 1 labels; it must be a list as long"),
        (
            "tokens",
            {"input_ids": [7, 8], "labels": [8, -100]},
            "labels[0]",
            "training shifts labels to the next token itself",
        ),
        ("tokens", {"input_ids": [7, 8], "labels": [7, -100]}, "labels", "after the first token every label is -100"),
        ("tokens", {"input_ids": [7, 8], "attention_mask": [1, 0]}, "attention_mask", "leave padding tokens out"),
        ("text", {"text": None}, "text", "is missing or null; it must be a string"),
        ("text", {"text": "\n"}, "text", "is empty"),
        ("alpaca", {"instruction": "x", "output": "y", "weight": 0}, "weight", "there is nothing to learn in this row"),
        ("alpaca", {"instruction": "x", "output": "y", "weight": 101}, "weight", "is 101; it must be 0, or a number"),
        ("prompt-completion", {"prompt": "x", "completion": "y", "weight": 0.0}, "weight", "is 0, so there is nothing"),
        (
            "prompt-completion",
            {"prompt": "x", "completion": "y", "weight": True},
            "weight",
            "is True; it must be 0, or",
        ),
        ("prompt-completion", {"prompt": "x", "completion": "y", "weight": "70 kg"}, "weight", "rename a column that"),
        ("prompt-completion", {"prompt": "x", "completion": "y", "weight": math.nan}, "weight", "is nan; it must be 0"),
        ("prompt-completion", {"prompt": 1, "completion": ["x"]}, "completion", "is a JSON array; it must be a string"),
    ],
)
def test_what_other_rows_may_not_be(fmt: str, columns: dict[str, Any], field: str, words: str) -> None:
    assert words in problems(fmt, columns)[field]


def test_an_answer_may_have_a_weight() -> None:
    for weight in (None, 1, 0.001, 2.5, 100):
        assert problems("prompt-completion", {"prompt": "x", "completion": "y", "weight": weight}) == {}
        assert problems("alpaca", {"instruction": "x", "output": "y", "score": weight}, weight="score") == {}
    # There is something to learn in the earlier turns.
    assert problems("alpaca", {"instruction": "x", "output": "y", "history": [["a", "b"]], "weight": 0}) == {}


def test_paths_name_the_users_columns() -> None:
    found = problems("alpaca", {"q": 1, "output": "x"}, instruction="q", input="context")
    assert set(found) == {"q", "context"}
    assert "context is missing (the row has output, q)" in found["context"]

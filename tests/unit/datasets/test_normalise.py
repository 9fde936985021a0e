"""One meaning for every format: rows written in each of them come out as what they were made from."""

from __future__ import annotations

import json
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizon_formats.checks import check_row
from horizon_formats.files import Row
from horizon_formats.formats import DatasetFormat
from horizon_formats.rows import read_rows
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.tokens.rendering import Chat, NormalRow, Pair, Text, Tokens, normalise

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
filled = texts.filter(lambda text: text.strip() != "")
turns = st.lists(st.tuples(texts, filled), min_size=1, max_size=4)


def read(fmt: str, columns: dict[str, Any], **field_map: str) -> NormalRow:
    """Check and normalise what JSON makes of the columns."""
    columns = json.loads(json.dumps(columns))
    assert check_row(Row(file="d.jsonl", number=1, columns=columns), DatasetFormat(fmt), field_map) == []
    return normalise(columns, DatasetFormat(fmt), field_map)


def chat(pairs: list[tuple[str, str]], system: str = "") -> Chat:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system, "weight": 1}] if system else []
    for asked, answer in pairs:
        messages.append({"role": "user", "content": asked, "weight": 1})
        messages.append({"role": "assistant", "content": answer, "weight": 1})
    return Chat(messages=messages)


@given(pairs=turns, system=texts)
def test_messages_sharegpt_and_alpaca_say_the_same(pairs: list[tuple[str, str]], system: str) -> None:
    expected = chat(pairs, system)
    plain = [{"role": m["role"], "content": m["content"]} for m in expected.messages]
    assert read("messages", {"messages": plain}) == expected
    assert read("sharegpt", {"conversations": plain}) == expected
    spoken = {"system": "system", "user": "human", "assistant": "gpt"}
    conversation = [{"from": spoken[m["role"]], "value": m["content"]} for m in expected.messages]
    assert read("sharegpt", {"conversations": conversation}) == expected
    beside = conversation[1:] if system else conversation
    assert read("sharegpt", {"conversations": beside, "system": system}) == expected
    *history, (asked, answer) = pairs
    row = {"instruction": asked, "output": answer, "history": history, "system": system}
    assert read("alpaca", row) == expected


@given(weights=st.lists(st.sampled_from([0, 1, 1.0, None]), min_size=1, max_size=5))
def test_weights_are_zero_or_one(weights: list[float | None]) -> None:
    messages = [{"role": "assistant", "content": "x", "weight": weight} for weight in [*weights, 1]]
    row = read("messages", {"messages": messages})
    assert isinstance(row, Chat)
    assert [message["weight"] for message in row.messages] == [0 if weight == 0 else 1 for weight in [*weights, 1]]


@given(prompt=texts, completion=filled)
def test_pairs_and_texts_stay_what_they_are(prompt: str, completion: str) -> None:
    row = {"q": prompt, "completion": completion}
    assert read("prompt-completion", row, prompt="q") == Pair(prompt=prompt, completion=completion)
    assert read("text", {"text": completion}) == Text(text=completion)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=2))
def test_tokens_keep_ids_and_labels(tokens: list[tuple[int, bool]]) -> None:
    ids = [token for token, _ in tokens]
    assert read("tokens", {"input_ids": ids}) == Tokens(input_ids=ids, labels=ids)
    labels = [token if trained else -100 for token, trained in tokens[:-1]] + [ids[-1]]
    assert read("tokens", {"input_ids": ids, "labels": labels}) == Tokens(input_ids=ids, labels=labels)


MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "tool"]), "content": texts},
        optional={"weight": st.sampled_from([0, 1]), "name": filled},
    ),
    max_size=3,
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"city": filled},
        optional={"day": st.integers(0, 9), "where": st.fixed_dictionaries({"x": filled}, optional={"y": filled})},
    ).map(lambda arguments: {"type": "function", "function": {"name": "f", "arguments": arguments}}),
    min_size=1,
    max_size=2,
)


@given(
    chats=st.lists(st.tuples(MESSAGES, CALLS | st.none(), filled), min_size=1, max_size=4),
    ids=st.lists(st.lists(st.integers(0, 99), min_size=2, max_size=5), min_size=1, max_size=4),
)
def test_a_table_means_what_its_rows_mean(
    tmp_path_factory: pytest.TempPathFactory,
    chats: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None, str]],
    ids: list[list[int]],
) -> None:
    path = tmp_path_factory.getbasetemp() / "same.parquet"
    replies = [
        {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {}) for _, calls, text in chats
    ]
    rows = [{"messages": [*before, reply]} for (before, _, _), reply in zip(chats, replies, strict=True)]
    tokens = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in ids]
    for fmt, written in ((DatasetFormat.MESSAGES, rows), (DatasetFormat.TOKENS, tokens)):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(written), path)
        found = list(read_rows(StoredFile.at(path)))
        assert [check_row(row, fmt, {}) for row in found] == [[]] * len(written)
        read_back = [normalise(row.columns, fmt, {}) for row in found]
        assert read_back == [read(fmt.value, row) for row in written]


def test_the_input_of_alpaca_follows_its_instruction() -> None:
    row = {"instruction": "Translate.", "input": "ciao", "output": "hello"}
    assert read("alpaca", row) == chat([("Translate.\nciao", "hello")])
    assert read("alpaca", row | {"input": ""}) == chat([("Translate.", "hello")])


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_tool_calls_reach_the_template_as_objects(arguments: object) -> None:
    call = {"id": "c1", "function": {"name": "weather", "arguments": arguments}}
    told = {"role": "tool", "content": "20 C", "tool_call_id": "c1", "name": None}
    tools = [{"type": "function", "function": {"name": "weather"}}]
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}, told]
    row = read("messages", {"messages": messages, "tools": json.dumps(tools)})
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert row == Chat(
        messages=[
            {
                "role": "assistant",
                "content": "",
                "weight": 1,
                "tool_calls": [{"type": "function", "id": "c1", "function": function}],
            },
            {"role": "tool", "content": "20 C", "weight": 1, "tool_call_id": "c1"},
        ],
        tools=tools,
    )
    spoken = [
        {"from": "function_call", "value": json.dumps({"name": "weather", "arguments": arguments})},
        {"from": "observation", "value": "20 C"},
    ]
    said = read("sharegpt", {"conversations": spoken, "tools": tools})
    assert isinstance(said, Chat)
    assert said.messages[0]["tool_calls"] == [{"type": "function", "function": function}]
    assert said.messages[1] == {"role": "tool", "content": "20 C", "weight": 1}
    assert said.tools == tools


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    row = read("messages", {"messages": [{"role": "assistant", "content": parts}]})
    assert isinstance(row, Chat)
    assert row.messages[0]["content"] == "one two"

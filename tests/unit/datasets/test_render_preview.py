"""What the rendering child shows: the rows asked for, in bounded size, and why a row is not trained."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from horizon_server.children.entry import EventWriter
from horizon_server.codec import from_json, to_json, to_plain
from horizon_server.datasets import preview_child as child
from horizon_server.datasets.preview import (
    MAX_CHARACTERS,
    MAX_PROBLEMS,
    MAX_ROW_CHARACTERS,
    MAX_SPANS,
    PreviewOptions,
    PreviewRequest,
    PreviewRow,
    rows_from_answer,
)
from horizon_server.datasets.preview_child import render
from horizon_server.datasets.reading import StoredFile
from horizon_server.demo.recipe import write_demo_model
from horizon_server.errors import InvalidData, InvalidModel, WorkerFailed


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def ask(model_dir: Path, tmp_path: Path) -> Any:
    """Render rows of files given by name; other words are options."""

    def request(
        files: dict[str, str], *, format: str = "auto", model: Path | None = None, **options: Any
    ) -> PreviewRequest:
        for name, content in files.items():
            (tmp_path / name).write_text(content, "utf-8")
        return PreviewRequest(
            dataset_files=tuple(StoredFile.at(tmp_path / name) for name in files),
            model_dir=model or model_dir,
            format=format,
            field_map={},
            options=PreviewOptions(**options),
        )

    return request


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}


def text_of(row: PreviewRow) -> str:
    return "".join(span.text for span in row.spans)


def trained_text(row: PreviewRow) -> list[str]:
    return [span.text for span in row.spans if span.trained]


def test_a_weight_crosses_from_the_child(ask: Any) -> None:
    row = chat("1+1?", "2", "sure?", "yes")
    row["messages"][3]["weight"] = 0.3
    (shown,) = rows_from_answer(child.work(to_plain(ask({"a.jsonl": lines(row)})), EventWriter()))
    assert [(span.text, span.weight) for span in shown.spans if span.trained] == [
        ("2<|im_end|>", None),
        ("yes<|im_end|>", 0.3),
    ]


def test_a_chat_shows_its_turns_and_what_is_trained_of_them(ask: Any) -> None:
    (row,) = render(ask({"a.jsonl": lines(chat("1+1?", "2", "sure?", "yes"))}))
    assert text_of(row) == (
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    )
    assert trained_text(row) == ["2<|im_end|>", "yes<|im_end|>"]
    assert (row.file, row.unit, row.number, row.num_documents, row.clipped, row.problems) == (
        "a.jsonl",
        "line",
        1,
        1,
        False,
        (),
    )
    (last,) = render(ask({"a.jsonl": lines(chat("1+1?", "2", "sure?", "yes"))}, train_on="last-assistant"))
    assert trained_text(last) == ["yes<|im_end|>"]


def test_an_offset_counts_rows_over_all_files(ask: Any) -> None:
    files = {
        "a.jsonl": lines(chat("a", "1"), chat("b", "2")) + "\n",
        "b.jsonl": "\n" + lines(chat("c", "3"), chat("d", "4")),
    }
    rows = render(ask(files, offset=1, num_rows=2))
    assert [(row.file, row.number, trained_text(row)) for row in rows] == [
        ("a.jsonl", 2, ["2<|im_end|>"]),
        ("b.jsonl", 2, ["3<|im_end|>"]),
    ]
    assert render(ask(files, offset=4)) == ()


def test_a_plain_text_is_shown_in_the_pieces_that_are_trained(ask: Any) -> None:
    words = "One line of an old play.\nAnother line, and one more.\n" * 30
    rows = render(ask({"play.txt": words}, method="pretrain", sequence_length=64, num_rows=100))
    assert len(rows) > 5
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    assert {row.unit for row in rows} == {"piece"}
    assert "".join(map(text_of, rows)).removesuffix("<|endoftext|>") == words
    assert all(row.num_trained_tokens == row.num_tokens - 1 <= 63 for row in rows)


def test_a_row_that_is_cut_says_how_much(ask: Any) -> None:
    (row,) = render(ask({"a.jsonl": lines(chat("why?", "because " * 100))}, sequence_length=32))
    assert row.num_tokens == 32
    assert row.num_cut_tokens > 50
    assert 0 < row.num_trained_tokens < 32


def test_a_row_that_is_not_trained_says_why(ask: Any) -> None:
    files = {"a.jsonl": lines(chat("long " * 100, "2"), {"text": "no chat"}) + "{broken\n"}
    cut, other, broken = render(ask(files, format="messages", sequence_length=32))
    assert "within sequence_length 32 none is trained" in cut.problems[0]
    assert text_of(cut).startswith("<|im_start|>user\nlong long")
    assert "messages" in other.problems[0]
    assert (broken.spans, len(broken.problems)) == ((), 1)
    assert broken.number == 3


def test_long_rows_are_clipped_and_all_rows_together_too(ask: Any) -> None:
    long = lines(chat("why?", "because " * 10_000))
    rows = render(ask({"a.jsonl": long * 40}, num_rows=40, sequence_length=1_000_000))
    assert all(row.clipped for row in rows)
    assert len(text_of(rows[0])) == MAX_ROW_CHARACTERS
    assert sum(len(text_of(row)) for row in rows) == MAX_CHARACTERS
    assert rows[-1].num_tokens == rows[0].num_tokens > 10_000, "what is not shown is counted all the same"


def test_spans_and_problems_are_bounded(ask: Any) -> None:
    turns = [f"{i}" for i in range(2 * MAX_SPANS + 2)]
    (many,) = render(ask({"a.jsonl": lines(chat(*turns))}, sequence_length=100_000))
    assert len(many.spans) <= MAX_SPANS
    assert many.clipped
    odd = {"messages": [{"role": f"nobody-{i}", "content": "x"} for i in range(MAX_PROBLEMS + 5)]}
    (row,) = render(ask({"a.jsonl": lines(odd)}, format="messages"))
    assert len(row.problems) == MAX_PROBLEMS


def test_half_a_surrogate_pair_is_no_row(ask: Any, tmp_path: Path) -> None:
    """Neither the wire nor a tokenizer can carry it."""
    model = write_demo_model(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ '\\ud800' + messages[0]['content'] }}", encoding="ascii")
    (row,) = render(ask({"a.jsonl": lines(chat("a", "b"))}, model=model, train_on="all"))
    assert "surrogate" in row.problems[0]


def test_a_model_without_a_template_cannot_show_chats(ask: Any, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    with pytest.raises(InvalidData, match="the model has no chat template"):
        render(ask({"a.jsonl": lines(chat("a", "b"))}, model=model))
    (row,) = render(ask({"b.jsonl": lines({"prompt": "1+1=", "completion": "2"})}, model=model))
    assert trained_text(row) == ["2<|endoftext|>"]


def test_a_model_without_a_tokenizer_cannot_show_anything(ask: Any, tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(InvalidModel, match="tokenizer"):
        render(ask({"b.jsonl": lines({"prompt": "1+1=", "completion": "2"})}, model=model))


def test_request_and_rows_survive_the_way_to_the_child_and_back(ask: Any) -> None:
    request = ask({"a.jsonl": lines(chat("a", "b"))}, offset=0, train_on="all")
    assert from_json(PreviewRequest, to_json(request)) == request
    rows = render(request)
    assert rows_from_answer(json.loads(json.dumps(to_plain(rows)))) == rows
    for odd in (None, 1, [{"spans": 1}], [{"file": "a", "spans": [], "problems": []}], [1]):
        with pytest.raises(WorkerFailed):
            rows_from_answer(odd)


def test_no_message_says_where_the_model_is(ask: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    request = ask({"a.jsonl": lines(chat("a", "b"))}, model=tmp_path / "empty")
    with pytest.raises(InvalidModel) as caught:
        child.work(to_plain(request), EventWriter(os.open(os.devnull, os.O_WRONLY)))
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize("container", ["array", "parquet", "zstd", "gzip"])
def test_rows_of_every_container_are_found_by_their_number(ask: Any, tmp_path: Path, container: str) -> None:
    rows = [{"prompt": f"{i}+0=", "completion": str(i), "extra": [i]} for i in range(20)]
    request = ask({}, offset=7, num_rows=2)
    name = {"array": "a.json", "parquet": "a.parquet", "zstd": "a.jsonl.zst", "gzip": "a.jsonl.gz"}[container]
    if container == "array":
        (tmp_path / name).write_text(json.dumps(rows))
    elif container == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / name, row_group_size=3)
    elif container == "zstd":
        with pyarrow.CompressedOutputStream(str(tmp_path / name), "zstd") as stream:
            stream.write(lines(*rows).encode())
    else:
        (tmp_path / name).write_bytes(gzip.compress(lines(*rows).encode()))
    shown = render(dataclasses.replace(request, dataset_files=(StoredFile.at(tmp_path / name),)))
    assert [(row.number, trained_text(row)) for row in shown] == [(8, ["7<|im_end|>"]), (9, ["8<|im_end|>"])]
    assert {row.unit for row in shown} == {"row" if container in ("array", "parquet") else "line"}


def test_answers_are_shown_one_after_the_other_and_count_as_one_row(ask: Any) -> None:
    pairs = lines(*({"prompt": f"{n}?", "chosen": f"{n}.", "rejected": f"Not {n}."} for n in range(5)))
    rows = render(ask({"p.jsonl": pairs}, num_rows=2, offset=1))
    assert [(row.number, row.part) for row in rows] == [(2, "chosen"), (2, "rejected"), (3, "chosen"), (3, "rejected")]
    assert text_of(rows[1]) == "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\nNot 1.<|im_end|>\n"
    assert trained_text(rows[1]) == ["Not 1.<|im_end|>\n"]
    assert rows_from_answer(to_plain(rows)) == rows


def test_answers_and_samples_say_what_they_are_worth(ask: Any) -> None:
    labelled = lines(*({"prompt": "a", "completion": "b", "label": label} for label in (True, False)))
    assert [row.part for row in render(ask({"k.jsonl": labelled}))] == ["desirable", "undesirable"]
    sample = {"tokens": [5, 6, 7, 8], "logprobs": [-1, -2], "prompt_length": 2}
    samples = lines(sample | {"advantage": 0.5}, sample | {"advantages": [-1, 2]})
    shown = render(ask({"s.jsonl": samples}))
    assert [row.part for row in shown] == ["advantage 0.5", "advantages -1 to 2"]
    assert [(row.num_tokens, row.num_trained_tokens) for row in shown] == [(4, 2), (4, 2)]


def test_a_pair_of_which_one_answer_cannot_be_used_has_its_reason_on_both(ask: Any) -> None:
    pairs = lines({"prompt": "word " * 99, "chosen": "a", "rejected": "b"})
    for row in render(ask({"p.jsonl": pairs}, sequence_length=16)):
        assert (row.num_documents, row.num_trained_tokens) == (0, 0)
        assert "tokens before the first that is trained, so within sequence_length 16 none is" in row.problems[0]
    (refused,) = render(ask({"p.jsonl": lines({"prompt": "a", "chosen": "b", "rejected": "b"})}))
    assert refused.problems == ("p.jsonl:1: rejected is the same as chosen; there is nothing to prefer",)

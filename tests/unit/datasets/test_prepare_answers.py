"""From files of preferences, labelled answers and samples to prepared folders: groups, labels, numbers, and what is cut
or left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.datasets.test_prepare import child, request_for, run, write
from tests.unit.datasets.written_files import parquet

from horizon_formats.files import Row
from horizon_formats.formats import DatasetFormat
from horizon_server.children.entry import Answer
from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.tokenization import RowTokenizer
from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.errors import InvalidData

Document = tuple[list[int], list[int]]


def answers_of(dataset: PreparedDataset) -> list[Document]:
    """The tokens of each document, and those of them that are targets."""
    rows = [dataset.micro_batch([number]) for number in range(dataset.num_documents)]
    return [(row.input_ids_T.tolist(), [label for label in row.labels_T.tolist() if label >= 0]) for row in rows]


def pair(number: int, *, prompt: str = "Which?", length: int = 1) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": f"{number} " * length, "rejected": f"Not {number}."}


def labelled(number: int) -> dict[str, Any]:
    return {"prompt": f"Is it {number}?", "completion": f"It is {number}.", "label": number % 3 == 0}


def sample(number: int, num_tokens: int = 6) -> dict[str, Any]:
    numbers = [-(number + place / 16) for place in range(num_tokens - 2)]
    return {
        "tokens": [number + 1, *range(2, num_tokens + 1)],
        "logprobs": numbers,
        "advantages": [value / 2 for value in numbers],
        "prompt_length": 2,
    }


def test_chosen_and_rejected_follow_each_other_and_the_answer_alone_is_trained(
    demo_model: Path, tmp_path: Path
) -> None:
    codec = TextCodec.from_folder(demo_model)
    assert codec.chat_template is not None
    report, documents = run(request_for(demo_model, write(tmp_path / "p.jsonl", *map(pair, range(3)))))
    cue = "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    for number in range(3):
        for (ids, labels), answer in zip(documents[2 * number :], (f"{number} ", f"Not {number}."), strict=False):
            assert codec.decode(ids) == f"{cue}{answer}<|im_end|>\n"
            # The template's line break after the turn is part of the text that TRL compares, so it is one here.
            assert codec.decode([label for label in labels if label >= 0]) == f"{answer}<|im_end|>\n"
    assert (report.rows, report.documents, report.kind) == (3, 6, "preference")


def test_a_pair_is_cut_or_left_out_as_a_whole(demo_model: Path, tmp_path: Path) -> None:
    rows = [pair(1), pair(2, length=60), pair(3, prompt="Which of them? " * 9), pair(4)]
    report, _ = run(request_for(demo_model, write(tmp_path / "p.jsonl", *rows), sequence_length=32))
    dataset = PreparedDataset.open(tmp_path / "out")
    assert dataset.num_documents == report.documents == 6
    assert (report.truncated_rows, report.error_rows) == (1, 1)
    assert report.longest_document == 32
    assert report.errors[0].startswith("p.jsonl:3 has ")
    assert "tokens before the first that is trained, so within sequence_length 32 none is" in report.errors[0]
    # The rejected answer of the second row is short, and stays next to the chosen one that is cut.
    run(request_for(demo_model, tmp_path / "p.jsonl", output=tmp_path / "whole", sequence_length=512))
    assert report.truncated_tokens == PreparedDataset.open(tmp_path / "whole").document_lengths[2] - 32


def test_labelled_rows_are_followed_by_their_prompt_with_the_next_completion(bare_model: Path, tmp_path: Path) -> None:
    codec = TextCodec.from_folder(bare_model)
    report, _ = run(request_for(bare_model, write(tmp_path / "k.jsonl", *map(labelled, range(4)))))
    dataset = PreparedDataset.open(tmp_path / "out")
    found = [(codec.decode(ids), codec.decode(targets)) for ids, targets in answers_of(dataset)]
    expected = []
    for number, other in ((0, 1), (1, 2), (2, 3), (3, 0)):
        answers = (f"It is {number}.<|endoftext|>", f"It is {other}.<|endoftext|>")
        expected += [(f"Is it {number}?{answer}", answer) for answer in answers]
    assert found == expected
    assert dataset.labels_of(range(8)).tolist() == [1, -1, 0, -1, 0, -1, 1, -1]
    assert (report.rows, report.documents) == (4, 8)


def test_one_labelled_row_has_no_other_to_join(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="kto needs at least two rows"):
        run(request_for(demo_model, write(tmp_path / "k.jsonl", labelled(0))))


def test_samples_keep_their_numbers_and_lose_those_that_are_cut(demo_model: Path, tmp_path: Path) -> None:
    rows = [sample(1), sample(2, 12), sample(3)]
    report, _ = run(request_for(demo_model, write(tmp_path / "s.jsonl", *rows), sequence_length=8))
    dataset = PreparedDataset.open(tmp_path / "out")
    assert dataset.kind == "samples"
    assert answers_of(dataset)[1] == (rows[1]["tokens"][:8], rows[1]["tokens"][2:8])
    assert dataset.old_logprobs_of([1, 0]).tolist() == rows[1]["logprobs"][:6] + rows[0]["logprobs"]
    assert torch.equal(dataset.advantages_of([0, 1, 2]), dataset.old_logprobs_of([0, 1, 2]) / 2)
    assert (report.truncated_rows, report.truncated_tokens, report.trained_tokens) == (1, 4, 14)


def test_a_token_that_the_model_does_not_have_is_refused_by_its_line(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(
        InvalidData, match=r"s\.jsonl:2 cannot be used: tokens holds 999999, but the model's vocab_size is"
    ):
        run(
            request_for(
                demo_model, write(tmp_path / "s.jsonl", sample(1), sample(2) | {"tokens": [1, 2, 3, 4, 5, 999999]})
            )
        )


def test_messages_need_a_chat_template_and_texts_do_not(bare_model: Path, tmp_path: Path) -> None:
    row = {"prompt": [{"role": "user", "content": "a"}], "chosen": "b", "rejected": "c"}
    with pytest.raises(
        InvalidData, match=r"p\.jsonl:1 cannot be used: the row holds messages, but the model has no chat template"
    ):
        run(request_for(bare_model, write(tmp_path / "p.jsonl", row)))


def test_a_template_that_rewrites_the_prompt_is_refused(demo_model: Path) -> None:
    codec = TextCodec.from_folder(demo_model)
    # The question stands last, as if it were asked after its answer.
    source = "{% for m in messages | reverse %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    codec.chat_template = type(codec.chat_template)(source, {})  # type: ignore[misc]
    tokenizer = RowTokenizer(codec, PrepareOptions(), DatasetFormat.PREFERENCE)
    row = next(tokenizer.tokenize([Row(file="p.jsonl", number=1, columns=pair(1))]))
    assert "renders the prompt differently once an answer follows it" in row.violations[0].description


@pytest.mark.parametrize("kind", ["preference", "kto", "samples"])
def test_rows_are_held_out_with_all_that_belongs_to_them(demo_model: Path, tmp_path: Path, kind: str) -> None:
    make = {"preference": pair, "kto": labelled, "samples": sample}[kind]
    file = write(tmp_path / "rows.jsonl", *map(make, range(40)))
    report, _ = run(request_for(demo_model, file, eval_fraction=0.3))
    train, held_out = (PreparedDataset.open(place) for place in (tmp_path / "out", tmp_path / "out" / "evaluation"))
    group = train.group_size
    assert train.kind == held_out.kind == kind
    assert held_out.num_documents == group * report.eval_rows == report.eval_documents
    assert train.num_documents == group * (40 - report.eval_rows)
    # What is joined with a prompt is on the same side.
    sides = [
        {tuple(ids if kind == "samples" else answer) for ids, answer in answers_of(side)} for side in (train, held_out)
    ]
    assert not sides[0] & sides[1]


@pytest.mark.parametrize("kind", ["preference", "kto", "samples"])
def test_the_same_bytes_from_any_container_and_any_number_of_processes(
    demo_model: Path, tmp_path: Path, kind: str
) -> None:
    make = {"preference": pair, "kto": labelled, "samples": sample}[kind]
    # More than a megabyte, from which on files are shared among processes.
    filler = "-" * 6000
    rows = [make(number) | {"note": filler} for number in range(200)]
    written = write(tmp_path / "rows.jsonl", *rows)
    (tmp_path / "rows.parquet").write_bytes(parquet(rows))
    expected = None
    for name, file, num_processes in (
        ("one", written, 1),
        ("three", written, 3),
        ("table", tmp_path / "rows.parquet", 1),
    ):
        request = request_for(demo_model, file, output=tmp_path / name, format=DatasetFormat(kind))
        prepare(request, on_progress=lambda done: None, num_processes=num_processes)
        content = (tmp_path / name / "tokens.safetensors").read_bytes()
        expected = expected or content
        assert content == expected, name


def test_files_of_two_kinds_are_not_one_dataset(demo_model: Path, tmp_path: Path) -> None:
    files = write(tmp_path / "p.jsonl", pair(1)), write(tmp_path / "k.jsonl", labelled(1))
    with pytest.raises(InvalidData, match="these hold preference and kto"):
        run(request_for(demo_model, *files))


def test_the_child_reports_the_counts(demo_model: Path, tmp_path: Path) -> None:
    request = request_for(
        demo_model, write(tmp_path / "p.jsonl", *map(pair, range(3))), format=DatasetFormat.PREFERENCE
    )
    code, events, _ = child(request, tmp_path)
    assert code == 0
    assert isinstance(events[-1], Answer)
    assert events[-1].value["documents"] == 6
    assert json.loads((request.output_dir / "report.json").read_text())["kind"] == "preference"


words = st.lists(
    st.sampled_from(["a", "of", "the\n", " ", "\u00e9", "\U0001f642", "<|im_end|>", "x" * 30]), min_size=1, max_size=12
)
texts = words.map("".join).filter(str.strip)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(
        st.tuples(words.map("".join), texts, texts).filter(lambda row: row[1] != row[2]), min_size=1, max_size=5
    ),
    length=st.integers(8, 60),
    with_template=st.booleans(),
)
def test_what_is_shown_of_a_pair_is_what_is_trained_and_none_is_halved(
    demo_model: Path, bare_model: Path, rows: list[tuple[str, str, str]], length: int, with_template: bool
) -> None:
    codec = TextCodec.from_folder(demo_model if with_template else bare_model)
    tokenizer = RowTokenizer(codec, PrepareOptions(sequence_length=length), DatasetFormat.PREFERENCE)
    for prompt, chosen, rejected in rows:
        row = Row(file="p.jsonl", number=1, columns={"prompt": prompt, "chosen": chosen, "rejected": rejected})
        fitted, shown = next(tokenizer.tokenize([row])), tokenizer.show(row)
        assert [part.part for part in shown] == ["chosen", "rejected"]
        assert len(fitted.documents) in (0, 2)
        assert bool(fitted.documents) != bool(fitted.violations or fitted.left_out)
        assert fitted.num_cut_tokens == (sum(part.num_cut_tokens for part in shown) if fitted.documents else 0)
        for document, part in zip(fitted.documents, shown, strict=False):
            assert part.num_tokens == len(document.ids) <= length
            assert part.num_trained_tokens == document.num_targets > 0
            trained = [token for token, bit in zip(document.ids[1:], document.trained[1:], strict=True) if bit]
            decoded = codec.decode(trained)
            assert "".join(span.text for span in part.spans if span.trained) == decoded or "\ufffd" in decoded
        if len(fitted.documents) == 2:
            # One prompt, and in both the answer begins at the same token.
            starts = [document.trained.index(1) for document in fitted.documents]
            ids = [document.ids[: starts[0]].tolist() for document in fitted.documents]
            assert (starts[0], ids[0]) == (starts[1], ids[1])


def test_a_step_holds_whole_pairs_of_what_was_prepared(demo_model: Path, tmp_path: Path) -> None:
    run(request_for(demo_model, write(tmp_path / "p.jsonl", *(pair(n, length=n) for n in range(1, 20)))))
    dataset = PreparedDataset.open(tmp_path / "out")
    plan = StepPlan(dataset, sequence_length=64, tokens_per_step=128, epochs=1, group_size=dataset.group_size)
    for i in range(plan.num_steps):
        documents = [document for row in plan.documents_of(i) for document in row]
        assert documents[::2] == [document - 1 for document in documents[1::2]]

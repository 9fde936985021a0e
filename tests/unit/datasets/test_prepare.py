"""From data files to prepared folders: masks, truncation, splitting, and the child's conversation."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from horizon_formats.formats import DatasetFormat
from horizon_server.children.entry import Answer, Failure, decode_line
from horizon_server.codec import to_plain
from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareReport, PrepareRequest
from horizon_server.datasets.tokens.tokenization import split_text, text_blocks
from horizon_server.demo.recipe import demo_chats, write_demo_dataset
from horizon_server.engine.data import PreparedDataset
from horizon_server.errors import InvalidData
from horizon_server.events import PrepareProgress, decode

CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes, one.", "weight": 1},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "No."},
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def request_for(model: Path, *files: Path, output: Path | None = None, **options: Any) -> PrepareRequest:
    return PrepareRequest(
        dataset_files=tuple(StoredFile.at(file) for file in files),
        model_dir=model,
        output_dir=output or files[0].parent / "out",
        options=PrepareOptions(**({"sequence_length": 64} | options)),
    )


def run(request: PrepareRequest) -> tuple[PrepareReport, list[tuple[list[int], list[int]]]]:
    report = prepare(request, on_progress=lambda done: None)
    dataset = PreparedDataset.open(request.output_dir)
    assert dataset.report == json.loads(json.dumps(dataclasses.asdict(report)))
    rows = [dataset.micro_batch([document]) for document in range(dataset.num_documents)]
    assert report.trained_tokens == sum(row.num_targets for row in rows)
    assert report.tokens == dataset.num_tokens
    return report, [(row.input_ids_T.tolist(), row.labels_T.tolist()) for row in rows]


def targets(model: Path, labels: list[int]) -> str:
    decoded = AutoTokenizer.from_pretrained(model).decode([label for label in labels if label >= 0])
    assert isinstance(decoded, str)
    return decoded


@pytest.fixture(params=["demo_model", "tiny_base"])
def marked_model(request: pytest.FixtureRequest) -> Path:
    folder = request.getfixturevalue(request.param)
    assert isinstance(folder, Path)
    return folder


def test_tokens_and_masks_are_those_of_transformers(marked_model: Path, tmp_path: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(marked_model)
    report, documents = run(request_for(marked_model, write_demo_dataset(tmp_path), sequence_length=512))
    for chat, (ids, labels) in zip(demo_chats(), documents, strict=True):
        expected = reference.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        mask = [*expected["assistant_masks"][1:], 0]
        assert ids == expected["input_ids"]
        assert labels == [token if trained else -100 for token, trained in zip([*ids[1:], 0], mask, strict=True)]
    assert (report.rows, report.documents, report.truncated_rows) == (len(demo_chats()), len(demo_chats()), 0)


def test_the_same_template_without_markers_gives_the_same_masks(marked_model: Path, tmp_path: Path) -> None:
    unmarked = tmp_path / "unmarked"
    shutil.copytree(marked_model, unmarked, copy_function=shutil.copyfile)
    unmarked.chmod(0o755)
    template = (unmarked / "chat_template.jinja").read_text()
    for marker in ("{% generation %}", "{% endgeneration %}", "{%- generation -%}", "{%- endgeneration -%}"):
        template = template.replace(marker, "")
    assert "generation %}" not in template.replace("add_generation_prompt", "")
    (unmarked / "chat_template.jinja").write_text(template)
    file = write_demo_dataset(tmp_path)
    _, marked = run(request_for(marked_model, file, output=tmp_path / "a", sequence_length=512))
    _, plain = run(request_for(unmarked, file, output=tmp_path / "b", sequence_length=512))
    assert marked == plain


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "Yes, one.<|im_end|>No.<|im_end|>"),
        ({"train_on": "last-assistant"}, "No.<|im_end|>"),
        (
            {"train_on": "all"},
            "user\nOne?<|im_end|>\n<|im_start|>assistant\nYes, one.<|im_end|>\n"
            "<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n",
        ),
    ],
)
def test_train_on_chooses_the_turns(demo_model: Path, tmp_path: Path, options: dict[str, Any], expected: str) -> None:
    _, [(_, labels)] = run(request_for(demo_model, write(tmp_path / "c.jsonl", {"messages": CHAT}), **options))
    assert targets(demo_model, labels) == expected
    if options.get("train_on") == "all":
        pretrain = request_for(demo_model, tmp_path / "c.jsonl", output=tmp_path / "p", method="pretrain")
        assert run(pretrain)[1][0][1] == labels


def test_a_weight_of_zero_leaves_a_reply_out(demo_model: Path, tmp_path: Path) -> None:
    muted = [CHAT[0], CHAT[1] | {"weight": 0}, *CHAT[2:]]
    _, [(_, labels)] = run(request_for(demo_model, write(tmp_path / "c.jsonl", {"messages": muted})))
    assert targets(demo_model, labels) == "No.<|im_end|>"
    last_muted = [*CHAT[:3], CHAT[3] | {"weight": 0}]
    request = request_for(demo_model, write(tmp_path / "d.jsonl", {"messages": last_muted}), train_on="last-assistant")
    with pytest.raises(InvalidData, match=r"d\.jsonl:1 has no trained token"):
        prepare(request, on_progress=lambda done: None)


def test_a_prompt_and_its_completion_are_a_user_and_an_assistant_turn(demo_model: Path, tmp_path: Path) -> None:
    pairs = write(tmp_path / "p.jsonl", {"q": "One?", "a": "Yes, one."})
    chats = write(tmp_path / "c.jsonl", {"messages": CHAT[:2]})
    field_map = {"prompt": "q", "completion": "a"}
    _, from_pairs = run(request_for(demo_model, pairs, output=tmp_path / "x", field_map=field_map))
    _, from_chats = run(request_for(demo_model, chats, output=tmp_path / "y"))
    assert from_pairs == from_chats


def test_without_a_template_a_completion_follows_its_prompt(bare_model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "p.jsonl", {"prompt": "2 + 2 = ", "completion": "4"})
    _, [(ids, labels)] = run(request_for(bare_model, file))
    tokenizer: Any = AutoTokenizer.from_pretrained(bare_model)
    assert tokenizer.decode(ids) == "2 + 2 = 4<|endoftext|>"
    assert targets(bare_model, labels) == "4<|endoftext|>"
    with pytest.raises(InvalidData, match="the model has no chat template; add"):
        prepare(request_for(bare_model, write(tmp_path / "c.jsonl", {"messages": CHAT})), on_progress=lambda done: None)


def test_long_rows_are_cut_only_where_something_trained_is_left(demo_model: Path, tmp_path: Path) -> None:
    fine = {"prompt": "Hi", "completion": "one two three four " * 30}
    lost = {"prompt": "one two three four " * 30, "completion": "Hi"}
    report, [(ids, _)] = run(request_for(demo_model, write(tmp_path / "a.jsonl", fine)))
    assert (report.truncated_rows, len(ids), report.longest_document) == (1, 64, 64)
    whole = run(request_for(demo_model, tmp_path / "a.jsonl", output=tmp_path / "whole", sequence_length=4096))[1][0][0]
    assert (ids, report.truncated_tokens) == (whole[:64], len(whole) - 64)
    mixed = write(tmp_path / "m.jsonl", fine, lost, fine)
    report, documents = run(request_for(demo_model, mixed, output=tmp_path / "mixed"))
    assert (report.rows, len(documents), report.error_rows) == (3, 2, 1)
    assert report.errors[0].startswith("m.jsonl:2 has ")
    with pytest.raises(
        InvalidData, match=r"b\.jsonl:1 has \d+ tokens, and within sequence_length 64 none is trained"
    ) as caught:
        prepare(request_for(demo_model, write(tmp_path / "b.jsonl", lost, lost)), on_progress=lambda done: None)
    assert caught.value.message.endswith("(the first of 2 problems)")
    assert [violation.field for violation in caught.value.violations] == ["b.jsonl:1", "b.jsonl:2"]


def test_a_failed_preparation_leaves_nothing_behind(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    request = request_for(demo_model, write(tmp_path / "b.jsonl", {"text": 3}), output=tmp_path / "data" / "out")
    with pytest.raises(InvalidData, match=r"b\.jsonl:1: text is 3; it must be a string \(the only problem found\)"):
        prepare(request, on_progress=lambda done: None)
    assert list((tmp_path / "data").iterdir()) == []


def test_a_folder_that_is_there_already_is_kept(demo_model: Path, tmp_path: Path) -> None:
    request = request_for(demo_model, write(tmp_path / "c.jsonl", {"messages": CHAT}))
    run(request)
    before = (tmp_path / "out" / "tokens.safetensors").stat().st_ino
    run(request)
    assert (tmp_path / "out" / "tokens.safetensors").stat().st_ino == before
    assert {path.name for path in tmp_path.iterdir()} == {"c.jsonl", "out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"tokens.safetensors", "report.json"}


def test_several_files_make_one_dataset_and_problems_name_the_file(demo_model: Path, tmp_path: Path) -> None:
    first, second = write(tmp_path / "a.jsonl", {"messages": CHAT}), write(tmp_path / "b.jsonl", {"messages": CHAT[:2]})
    report, documents = run(request_for(demo_model, first, second))
    assert (report.rows, len(documents)) == (2, 2)
    broken = write(tmp_path / "z.jsonl", {"messages": CHAT}, {"messages": []})
    with pytest.raises(InvalidData, match=r"^z\.jsonl:2: messages is a JSON array") as caught:
        prepare(request_for(demo_model, first, broken, output=tmp_path / "o2"), on_progress=lambda done: None)
    assert caught.value.violations[0].field == "z.jsonl:2:messages"


@pytest.mark.parametrize("method", ["sft", "pretrain"])
def test_a_text_becomes_documents_of_the_sequence_length(bare_model: Path, tmp_path: Path, method: str) -> None:
    text = "".join(f"{chat[-1]['content']}\n" for chat in demo_chats()[:40])
    (tmp_path / "play.txt").write_text(text)
    report, documents = run(request_for(bare_model, tmp_path / "play.txt", method=method))
    tokenizer: Any = AutoTokenizer.from_pretrained(bare_model)
    assert [token for ids, _ in documents for token in ids] == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    assert all(labels == [*ids[1:], -100] for ids, labels in documents)
    assert {len(ids) for ids, _ in documents[:-1]} == {64}
    assert report.rows == 40
    rows = write(tmp_path / "rows.jsonl", {"text": text})
    from_rows = run(request_for(bare_model, rows, output=tmp_path / "r", method=method))[1]
    assert from_rows == documents


@settings(max_examples=50)
@given(lengths=st.lists(st.integers(0, 40), max_size=6), sequence_length=st.integers(8, 16))
def test_splitting_keeps_every_token_and_leaves_none_alone(lengths: list[int], sequence_length: int) -> None:
    total = sum(lengths)
    stream = iter(range(total))
    parts = ([next(stream) for _ in range(length)] for length in lengths)
    documents = [document for full in split_text(parts, sequence_length) for document in full]
    assert [token for document in documents for token in document.ids] == list(range(total))
    assert all(2 <= len(document.ids) <= sequence_length for document in documents) or total == 1


def test_text_is_cut_into_blocks_where_tokenizers_cut_too(demo_model: Path, qwen_class_model: Path) -> None:
    text = "".join(f"{chat[0]['content']}\n\n  {chat[-1]['content']} and more\n" for chat in demo_chats())
    blocks = list(text_blocks([text[i : i + 37] for i in range(0, len(text), 37)], block_characters=500))
    assert "".join(blocks) == text
    assert len(blocks) > 20
    for folder in (demo_model, qwen_class_model):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        assert [token for block in blocks for token in tokenizer(block)["input_ids"]] == tokenizer(text)["input_ids"]
    assert list(text_blocks(["x" * 30], block_characters=10)) == ["x" * 30]


def write_request(request: PrepareRequest, folder: Path, **more: Any) -> str:
    path = folder / "request.json"
    path.write_text(json.dumps(to_plain(request) | more))
    return str(path)


def child(request: PrepareRequest, folder: Path, **more: Any) -> tuple[int, list[Any], str]:
    """Run the real child with a pipe for its events."""
    reader, writer = os.pipe()
    place = write_request(request, folder, **more)
    command = [sys.executable, "-m", "horizon_server.datasets.preparing", place, "--events-fd", str(writer)]
    process = subprocess.run(command, pass_fds=[writer], capture_output=True, text=True, check=False, timeout=300)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        events = [decode_line(line) for line in stream]
    return process.returncode, events, process.stdout + process.stderr


@contextmanager
def killed_at_the_end(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Leave nothing running; `with process` would wait for one that a failure has left."""
    try:
        yield process
    finally:
        process.kill()
        process.wait(240)


def test_the_child_reports_progress_and_result(demo_model: Path, tmp_path: Path) -> None:
    request = request_for(demo_model, write_demo_dataset(tmp_path))
    code, events, output = child(request, tmp_path)
    assert (code, output) == (0, "")
    first, *_, end = events
    assert isinstance(first, PrepareProgress)
    assert first.done_rows > 0
    assert isinstance(end, Answer)
    assert end.value["rows"] == len(demo_chats())
    assert PreparedDataset.open(request.output_dir).num_tokens == end.value["tokens"]


def test_the_child_names_what_is_wrong(demo_model: Path, tmp_path: Path) -> None:
    bad = request_for(demo_model, write(tmp_path / "c.jsonl", *[{"messages": []}] * 200))
    code, events, _ = child(bad, tmp_path)
    error = events[-1].error
    assert (code, type(error)) == (1, InvalidData)
    assert error.message.endswith("(the first of 200 problems)")
    assert len(error.violations) == 100
    code, events, _ = child(request_for(demo_model, tmp_path / "gone.jsonl"), tmp_path)
    assert (code, events[-1].error.reason) == (1, "IO_ERROR")
    assert "gone.jsonl" in events[-1].error.message


def test_a_terminated_child_removes_what_it_wrote(demo_model: Path, tmp_path: Path) -> None:
    fifo = tmp_path / "endless.txt"
    os.mkfifo(fifo)
    (tmp_path / "work").mkdir()
    # With its format, as jobs have it: what is not decided yet is looked for before the folder is made.
    request = request_for(demo_model, fifo, output=tmp_path / "work" / "out", format=DatasetFormat.TEXT)
    place = write_request(request, tmp_path)
    command = [sys.executable, "-m", "horizon_server.datasets.preparing", place]
    # Opening the pipe waits until the child reads from it; by then its folder exists.
    with killed_at_the_end(subprocess.Popen(command, stdout=subprocess.DEVNULL)) as process, fifo.open("wb"):
        assert list((tmp_path / "work").iterdir()) != []
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 128 + signal.SIGTERM
    assert list((tmp_path / "work").iterdir()) == []


def test_a_terminated_child_takes_its_processes_with_it(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    request = request_for(demo_model, many_rows(tmp_path / "chats.jsonl", 40_000), output=tmp_path / "work" / "out")
    place = write_request(request, tmp_path, num_processes=2)
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "horizon_server.datasets.preparing", place, "--events-fd", str(writer)]
    with killed_at_the_end(subprocess.Popen(command, pass_fds=[writer], start_new_session=True)) as process:
        os.close(writer)
        with os.fdopen(reader) as events:
            # The first progress is told when tokens have come from the other processes.
            assert isinstance(decode(events.readline()), PrepareProgress)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=240) == 128 + signal.SIGTERM
            # The pipe ends when the last process that holds it is gone.
            assert all(isinstance(decode(line), PrepareProgress) for line in events)
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    assert list((tmp_path / "work").iterdir()) == []


def test_a_disk_that_runs_full_is_told_in_a_sentence(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    request = request_for(demo_model, write_demo_dataset(tmp_path), output=tmp_path / "work" / "out")
    place = write_request(request, tmp_path)
    # A limit on the size of files stands in for a full disk: the same write fails, with EFBIG.
    child_command = f"ulimit -f 16; exec {sys.executable} -m horizon_server.datasets.preparing {place}"
    done = subprocess.run(["bash", "-c", child_command], capture_output=True, text=True, check=False, timeout=300)
    end = decode_line(done.stdout.splitlines()[-1].encode())
    assert isinstance(end, Failure)
    assert (done.returncode, end.error.reason) == (1, "DISK_FULL")
    assert "no space left for the prepared dataset" in end.error.message
    assert list((tmp_path / "work").iterdir()) == []


def test_tokens_are_taken_as_they_are(demo_model: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", {"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9]})
    _, documents = run(request_for(demo_model, file))
    assert documents == [([5, 6, 7], [-100, 7, -100]), ([8, 9], [9, -100])]
    beyond = write(tmp_path / "b.jsonl", {"input_ids": [1, 10**6]})
    with pytest.raises(
        InvalidData, match=r"b\.jsonl:1 cannot be used: input_ids holds 1000000, but .* vocab_size is 1024"
    ):
        run(request_for(demo_model, beyond, output=tmp_path / "b"))


def test_every_container_gives_the_same_tokens(demo_model: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}?", "completion": f"{n}, yes.", "id": n} for n in range(40)]
    lines = write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes()))
    (tmp_path / "a.jsonl.zst").write_bytes(pyarrow.Codec("zstd").compress(lines.read_bytes(), asbytes=True))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    _, expected = run(request_for(demo_model, lines, output=tmp_path / "lines"))
    for name in ("a.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"):
        _, documents = run(request_for(demo_model, tmp_path / name, output=tmp_path / f"out-{name}"))
        assert documents == expected


def test_every_chat_format_gives_the_same_tokens(demo_model: Path, tmp_path: Path) -> None:
    pair = {"prompt": "Two?", "completion": "No."}
    alpaca = {"instruction": "Two?", "output": "No."}
    sharegpt = {"conversations": [{"from": "human", "value": "Two?"}, {"from": "gpt", "value": "No."}]}
    rows = {"messages": {"messages": CHAT[2:]}, "pair": pair, "alpaca": alpaca, "sharegpt": sharegpt}
    found = [
        run(request_for(demo_model, write(tmp_path / f"{name}.jsonl", row), output=tmp_path / name))[1]
        for name, row in rows.items()
    ]
    assert found == [found[0]] * 4
    assert targets(demo_model, found[0][0][1]) == "No.<|im_end|>"


def many_rows(path: Path, num_rows: int) -> Path:
    chats = demo_chats()[:40]

    def chat_of(number: int) -> list[dict[str, Any]]:
        """The last reply of the later ones has a weight, so that the first weight comes when much is written."""
        *before, reply = chats[number % 40]
        return [*before, reply | {"weight": 0.5}] if number > 3000 and number % 7 == 0 else [*before, reply]

    path.write_text(
        "".join(
            json.dumps({"messages": [*chat_of(number), {"role": "user", "content": f"{number}"}]}) + "\n"
            for number in range(num_rows)
        )
    )
    return path


def test_any_number_of_processes_writes_the_same_bytes(demo_model: Path, tmp_path: Path) -> None:
    chats, play = many_rows(tmp_path / "chats.jsonl", 6000), tmp_path / "play.txt"
    play.write_text("".join(f"{chat[-1]['content']} {n}\n" for n in range(400) for chat in demo_chats()[:40]))
    assert min(chats.stat().st_size, play.stat().st_size) > 1024 * 1024
    folders = []
    for processes in (1, 3):
        folders.append(tmp_path / f"with-{processes}")
        request = request_for(demo_model, chats, play, output=folders[-1], eval_fraction=0.2)
        code, events, _ = child(request, tmp_path, num_processes=processes)
        assert (code, events[-1].value["rows"]) == (0, 6000 + 400 * 40)
    names = ("tokens.safetensors", "report.json", "evaluation/tokens.safetensors")
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()


def test_the_tokens_file_is_aligned_and_typed(demo_model: Path, tmp_path: Path) -> None:
    request = request_for(demo_model, write(tmp_path / "c.jsonl", {"messages": CHAT}), format=DatasetFormat.MESSAGES)
    run(request)
    raw = (tmp_path / "out" / "tokens.safetensors").read_bytes()
    header_bytes = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + header_bytes])
    assert (8 + header_bytes) % 8 == 0
    begin, end = header["document_starts"]["data_offsets"]
    assert begin == 0
    starts = np.frombuffer(raw[8 + header_bytes :][begin:end], dtype="<i8")
    assert starts.tolist() == [0, header["input_ids"]["shape"][0]]


def test_a_text_of_one_token_is_told_not_dropped(bare_model: Path, tmp_path: Path) -> None:
    """A tokenizer without an end-of-text token leaves it alone, and nothing precedes it."""
    no_end = tmp_path / "no-end"
    shutil.copytree(bare_model, no_end)
    settings_file = no_end / "tokenizer_config.json"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"eos_token": None}))
    (tmp_path / "one.txt").write_text("a")
    (tmp_path / "more.txt").write_text("a b c d e f")
    report, documents = run(request_for(no_end, tmp_path / "one.txt", tmp_path / "more.txt"))
    assert (len(documents), report.error_rows) == (1, 1)
    assert report.errors == ("one.txt: the text is one token only; nothing precedes it, so there is nothing to learn",)
    with pytest.raises(InvalidData, match="the text is one token only"):
        prepare(request_for(no_end, tmp_path / "one.txt", output=tmp_path / "o"), on_progress=lambda done: None)

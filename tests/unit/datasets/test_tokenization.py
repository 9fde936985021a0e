"""One row for training and the same row for people: what is shown is what is trained."""

from __future__ import annotations

import array
import itertools
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from horizon_formats.files import Row
from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens import tokenization
from horizon_server.datasets.tokens.chat_template import ChatTemplate
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.tokenization import RowTokenizer
from horizon_server.errors import InvalidModel

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes, one."},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "No \u00e9\U0001f642."},
]


@pytest.fixture(scope="module")
def codec(demo_model: Path) -> TextCodec:
    return TextCodec.from_folder(demo_model)


@pytest.fixture(scope="module")
def bare_codec(bare_model: Path) -> TextCodec:
    return TextCodec.from_folder(bare_model)


def tokenizer_of(
    codec: TextCodec, dataset_format: DatasetFormat = DatasetFormat.MESSAGES, **options: Any
) -> RowTokenizer:
    return RowTokenizer(codec, PrepareOptions(**({"sequence_length": 256} | options)), dataset_format)


def row_of(**columns: Any) -> Row:
    return Row(file="d.jsonl", number=7, columns=columns)


def test_a_shown_row_is_its_text_with_the_trained_part_apart(codec: TextCodec) -> None:
    shown = tokenizer_of(codec).show(row_of(messages=CHAT))[0]
    assert [span.text for span in shown.spans if span.trained] == [
        "Yes, one.<|im_end|>",
        "No \u00e9\U0001f642.<|im_end|>",
    ]
    assert codec.chat_template is not None
    assert "".join(span.text for span in shown.spans) == codec.chat_template.render(CHAT)
    assert (shown.number, shown.num_cut_tokens, shown.num_documents, shown.problems) == (7, 0, 1, ())


def test_a_shown_row_ends_where_it_is_cut(codec: TextCodec) -> None:
    whole = tokenizer_of(codec).show(row_of(messages=CHAT))[0]
    cut = tokenizer_of(codec, sequence_length=40).show(row_of(messages=CHAT))[0]
    assert (cut.num_tokens, cut.num_cut_tokens) == (40, whole.num_tokens - 40)
    assert "".join(s.text for s in whole.spans).startswith("".join(s.text for s in cut.spans))
    lost = tokenizer_of(codec, sequence_length=8).show(row_of(messages=CHAT))[0]
    assert lost.problems[0].startswith("d.jsonl:7 has ")
    assert (lost.num_trained_tokens, lost.num_documents) == (0, 0)
    assert [span.trained for span in lost.spans] == [False]


def test_a_text_shows_the_tokens_around_it(bare_codec: TextCodec) -> None:
    text = tokenizer_of(bare_codec, DatasetFormat.TEXT).show(row_of(text="abc " * 9))[0]
    assert "".join(span.text for span in text.spans) == "abc " * 9 + "<|endoftext|>"
    assert [span.trained for span in text.spans] == [False, True]  # nothing precedes the first token
    ids = tokenizer_of(bare_codec, DatasetFormat.TOKENS).show(
        row_of(input_ids=bare_codec.encode_ids("abc def"), labels=None)
    )[0]
    assert "".join(span.text for span in ids.spans) == "abc def"


def test_weights_decide_whatever_is_trained_on(codec: TextCodec) -> None:
    muted = [message | {"weight": 0} if message["content"] in ("Two?", "Yes, one.") else message for message in CHAT]
    shown = tokenizer_of(codec, train_on="all").show(row_of(messages=muted))[0]
    left_out = "".join(span.text for span in shown.spans if not span.trained)
    assert left_out.endswith("<|im_start|>assistant\nYes, one.<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n")
    trained = "".join(span.text for span in shown.spans if span.trained)
    assert "Be kind." in trained
    assert trained.endswith("assistant\nNo \u00e9\U0001f642.<|im_end|>\n")
    pretrain = tokenizer_of(codec, method="pretrain").show(row_of(messages=muted))[0]
    assert pretrain == shown


WEIGHTED = [message | {"weight": weight} for message, weight in zip(CHAT, (1, 1, 0.3, 1, 2.5), strict=True)]


def weights_by_text(tokenizer: RowTokenizer, messages: list[dict[str, Any]]) -> dict[str, float | None]:
    (shown,) = tokenizer.show(row_of(messages=messages))
    return {span.text: span.weight for span in shown.spans if span.trained}


def test_a_weight_is_that_of_the_tokens_of_its_reply(codec: TextCodec) -> None:
    replies = {"Yes, one.<|im_end|>": 0.3, "No \u00e9\U0001f642.<|im_end|>": 2.5}
    assert weights_by_text(tokenizer_of(codec), WEIGHTED) == replies
    assert weights_by_text(tokenizer_of(codec, train_on="last-assistant"), WEIGHTED) == dict([[*replies.items()][1]])
    ((document,), (plain,)) = (
        next(tokenizer_of(codec).tokenize([row_of(messages=chat)])).documents for chat in (WEIGHTED, CHAT)
    )
    assert (document.ids, document.trained) == (plain.ids, plain.trained)
    lengths = [len(codec.encode_ids(text)) for text in replies]
    wanted = [*itertools.repeat(0.3, lengths[0]), *itertools.repeat(2.5, lengths[1])]
    assert document.target_weights == array.array("f", wanted)
    assert plain.target_weights is None


def test_with_all_trained_a_weight_is_that_of_the_whole_turn(codec: TextCodec) -> None:
    assert weights_by_text(tokenizer_of(codec, train_on="all"), WEIGHTED) == {
        # The first token is nobody's target.
        "system\nBe kind.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n": None,
        "<|im_start|>assistant\nYes, one.<|im_end|>\n": 0.3,
        "<|im_start|>user\nTwo?<|im_end|>\n": None,
        "<|im_start|>assistant\nNo \u00e9\U0001f642.<|im_end|>\n": 2.5,
    }
    (whole,) = next(tokenizer_of(codec, train_on="all").tokenize([row_of(messages=WEIGHTED)])).documents
    pieces = next(
        tokenizer_of(codec, method="pretrain", sequence_length=16).tokenize([row_of(messages=WEIGHTED)])
    ).documents
    assert len(pieces) > 2
    assert whole.weights is not None
    assert [weight for piece in pieces for weight in piece.weights or ()] == list(whole.weights)


def test_a_cut_row_keeps_the_weights_of_what_is_left(codec: TextCodec) -> None:
    (whole,) = next(tokenizer_of(codec).tokenize([row_of(messages=WEIGHTED)])).documents
    (cut,) = next(
        tokenizer_of(codec, sequence_length=len(whole.ids) - 2).tokenize([row_of(messages=WEIGHTED)])
    ).documents
    assert whole.target_weights is not None
    # The last token, a line break, is not trained.
    assert cut.target_weights == whole.target_weights[:-1]


def test_pretrain_splits_what_sft_cuts(codec: TextCodec) -> None:
    (whole,) = next(tokenizer_of(codec, train_on="all").tokenize([row_of(messages=CHAT)])).documents
    pieces = next(tokenizer_of(codec, method="pretrain", sequence_length=16).tokenize([row_of(messages=CHAT)]))
    assert [token for piece in pieces.documents for token in piece.ids] == list(whole.ids)
    assert pieces.num_cut_tokens == 0
    given = [5, 6, 7, 8] * 8
    labels = [-100] * 20 + given[20:]
    masked = tokenizer_of(codec, DatasetFormat.TOKENS, method="pretrain", sequence_length=16)
    fitted = next(masked.tokenize([row_of(input_ids=given, labels=labels)]))
    assert [list(document.ids) for document in fitted.documents] == [given[16:]]  # the first piece trains nothing
    assert fitted.num_cut_tokens == 16


messages = st.lists(
    st.tuples(st.text(max_size=12), st.text(min_size=1, max_size=12).filter(str.strip), st.integers(0, 1)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80)
@given(turns=messages, train_on=st.sampled_from(["assistant", "last-assistant", "all"]), limit=st.integers(8, 80))
def test_what_is_shown_is_what_is_trained(
    codec: TextCodec, turns: list[tuple[str, str, int]], train_on: str, limit: int
) -> None:
    chat = [
        message
        for asked, answer, weight in turns
        for message in (
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer, "weight": weight},
        )
    ]
    tokenizer = tokenizer_of(codec, train_on=train_on, sequence_length=limit)
    row = row_of(messages=chat)
    fitted, shown = next(tokenizer.tokenize([row])), tokenizer.show(row)[0]
    assert shown.num_documents == len(fitted.documents) == (0 if shown.problems else 1)
    assert shown.num_trained_tokens == sum(document.num_targets for document in fitted.documents)
    for document in fitted.documents:
        assert document.num_targets > 0
        assert len(document.ids) == shown.num_tokens <= limit
        trained_ids = [token for token, bit in zip(document.ids[1:], document.trained[1:], strict=True) if bit]
        shown_text = "".join(span.text for span in shown.spans if span.trained)
        decoded = codec.decode(trained_ids)
        assert shown_text == decoded or "\ufffd" in decoded


def test_rows_that_are_tokenized_together_are_those_that_are_tokenized_alone(codec: TextCodec) -> None:
    """Also where some have no texts to encode, and some fail only once they are encoded."""
    broken = [{"role": "user", "content": 3}]
    silent = [*CHAT[:2], {"role": "assistant", "content": "x", "weight": 0}, *CHAT[3:4]]
    rows = [row_of(messages=messages) for messages in (CHAT, broken, CHAT[:3], silent, CHAT[1:])]
    tokenizer = tokenizer_of(codec)
    together = list(tokenizer.tokenize(rows))
    assert together == [next(tokenizer.tokenize([row])) for row in rows]
    assert [bool(row.documents) for row in together] == [True, False, True, False, True]


def test_a_template_without_end_is_refused_by_the_row_that_it_does_not_end_for(
    codec: TextCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr(codec, "chat_template", ChatTemplate(endless, {}))
    monkeypatch.setattr(tokenization, "_MAX_TEMPLATE_S", 0.2)
    tokenizer = RowTokenizer(codec, PrepareOptions(), DatasetFormat.MESSAGES)
    words = r"template took more than 0\.2 s of processor time for d\.jsonl:7; it may never end"
    with pytest.raises(InvalidModel, match=words):
        list(tokenizer.tokenize([row_of(messages=CHAT)] * 2))
    with pytest.raises(InvalidModel, match="it may never end"):
        tokenizer.show(row_of(messages=CHAT))[0]
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)

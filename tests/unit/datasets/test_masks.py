"""Which tokens lie in a span of characters: exactly, or refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from horizon_server.datasets.tokens.rendering import token_mask
from horizon_server.errors import InvalidData


def vocabulary(*words: str) -> Tokenizer:
    """A tokenizer that knows single characters and these words, longest first."""
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(alphabet)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def trained(tokenizer: Tokenizer, text: str, *spans: tuple[int, int]) -> list[str]:
    encoding = tokenizer.encode(text)
    mask = token_mask(text, encoding, spans)
    assert len(mask) == len(encoding)
    return [text[slice(*encoding.offsets[index])] for index, bit in enumerate(mask) if bit]


def test_tokens_inside_the_span_are_trained() -> None:
    assert trained(vocabulary("hello"), "user: hello you", (6, 11)) == ["hello"]
    assert trained(vocabulary(), "abcdef", (0, 2), (4, 6)) == ["a", "b", "e", "f"]
    assert trained(vocabulary(), "abc", (1, 1)) == []


@pytest.mark.parametrize(
    ("word", "text", "span", "expected"),
    [
        (
            ".\n",
            "cue:Yes.\nNext",
            (4, 8),
            ["Y", "e", "s", ".\n"],
        ),  # the template's line break, glued to the reply's end
        (" Yes", "cue: Yes", (5, 8), [" Yes"]),  # the cue's space, glued to the reply's first word
        ("\n\n", "cue:\n\nYes", (5, 9), ["Y", "e", "s"]),  # white space on both sides belongs to the cue
        ("<|end|>\n", "a<|end|>\nb", (0, 8), ["a", "<|end|>\n"]),
    ],
)
def test_a_token_on_the_border_goes_where_its_letters_are(
    word: str, text: str, span: tuple[int, int], expected: list[str]
) -> None:
    assert trained(vocabulary(word), text, span) == expected


def test_a_token_with_letters_of_both_sides_is_refused() -> None:
    with pytest.raises(InvalidData, match="token 'e:Y' holds text that is trained and text that is not"):
        trained(vocabulary("e:Y"), "cue:Yes", (4, 7))
    with pytest.raises(InvalidData, match="token 's<'"):
        trained(vocabulary("s<"), "Yes<", (0, 3))


@settings(max_examples=80)
@given(
    parts=st.lists(st.tuples(st.text("ab \n.", min_size=1, max_size=6), st.booleans()), min_size=1, max_size=6),
    words=st.lists(st.text("ab \n.", min_size=2, max_size=4), max_size=6, unique=True),
)
def test_trained_tokens_spell_out_the_spans_but_for_white_space(
    parts: list[tuple[str, bool]], words: list[str]
) -> None:
    text = "".join(part for part, _ in parts)
    spans, at = [], 0
    for part, is_trained in parts:
        spans += [(at, at + len(part))] if is_trained else []
        at += len(part)
    tokenizer = vocabulary(*words)
    try:
        found = "".join(trained(tokenizer, text, *spans))
    except InvalidData:
        pieces = [text[slice(*offsets)] for offsets in tokenizer.encode(text).offsets]
        assert any(len(piece.strip()) > 1 for piece in pieces)
        return
    wanted = "".join(text[begin:end] for begin, end in spans)
    assert "".join(found.split()) == "".join(wanted.split())

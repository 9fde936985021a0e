"""Which characters of a rendered chat are trained, for templates with and without generation markers."""

from __future__ import annotations

from typing import Any, cast

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from horizon_server.datasets.tokens.chat_template import MAX_RENDERED_CHARACTERS, ChatTemplate
from horizon_server.errors import InvalidData, InvalidModel

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
END_MARKERS = ("<|im_end|>", "</s>", "<eot>")

PLAIN = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + "
    "'\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Turns without roles spelled out, content stripped, the end token glued to the reply.
BRACKETS = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
# Reasoning is shown in the last reply only, as some models do.
FORGETFUL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ m.content }}<eot>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": " hello\n"},
    {"role": "user", "content": "and?"},
    {"role": "assistant", "content": "bye"},
]


def trained(source: str, messages: list[dict[str, str]] = CHAT) -> list[str]:
    text, spans = ChatTemplate(source, SPECIAL, end_markers=END_MARKERS).assistant_spans(messages)
    return [text[span[0] : span[1]] for span in spans if span is not None]


def test_markers_and_prefixes_find_the_same_characters() -> None:
    assert trained(MARKED) == trained(PLAIN) == [" hello\n<|im_end|>", "bye<|im_end|>"]
    template = ChatTemplate(MARKED, SPECIAL)
    assert template.assistant_spans(CHAT) == ChatTemplate(PLAIN, SPECIAL, end_markers=END_MARKERS).assistant_spans(CHAT)


def test_spans_belong_to_their_messages() -> None:
    _, spans = ChatTemplate(PLAIN, SPECIAL, end_markers=END_MARKERS).assistant_spans(CHAT)
    assert [span is not None for span in spans] == [False, False, True, False, True]


def test_the_end_token_is_trained_where_it_is_glued_to_the_reply() -> None:
    assert trained(BRACKETS, CHAT[1:]) == [" hello</s>", " bye</s>"]


def test_a_reply_that_later_turns_render_differently_is_found_by_its_content() -> None:
    assert trained(FORGETFUL, CHAT[1:]) == [" hello\n<eot>", "<think></think>bye<eot>"]


def test_reasoning_that_is_dropped_from_earlier_replies_is_not_trained_there() -> None:
    dropping = PLAIN.replace(
        "message['content'] + '<|im_end|>'",
        "(message['content'] if loop.last or message['role'] == 'user' else message['content'].split('</think>')[-1]) "
        "+ '<|im_end|>'",
    )
    chat = [message | {"content": f"<think>hm</think>{message['content']}"} for message in CHAT[1:]]
    assert trained(dropping, chat) == [" hello\n<|im_end|>", "<think>hm</think>bye<|im_end|>"]


def test_a_template_without_end_tokens_trains_the_whole_turn() -> None:
    source = (
        "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
        "{% if add_generation_prompt %}### assistant\n{% endif %}"
    )
    assert trained(source, CHAT[1:3]) == [" hello\n\n\n"]


def test_an_end_of_text_behind_the_chat_is_not_generated() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eot>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% else %}</s>{% endif %}"
    )
    assert trained(source) == [" hello\n<eot>", "bye<eot>"]
    template = ChatTemplate(source, SPECIAL, end_markers=END_MARKERS)
    text = template.render(CHAT)
    turns = [text[slice(*template.turn_span(CHAT, index, text))] for index in range(len(CHAT))]
    assert turns[1:3] == ["<user>hi<eot>\n", "<assistant> hello\n<eot>\n"]
    assert "".join(turns) == text


def test_turns_that_are_not_rendered_one_after_the_other_are_refused() -> None:
    backwards = "{% for m in messages | reverse %}{{ m.content }}<eot>{% endfor %}"
    template = ChatTemplate(backwards, SPECIAL, end_markers=END_MARKERS)
    with pytest.raises(
        InvalidData, match=r"does not render the chat turn by turn, so messages\[1\] cannot be left out"
    ):
        template.turn_span(CHAT, 1, template.render(CHAT))


def test_templates_that_cannot_be_masked_are_refused_with_the_reason() -> None:
    cue_differs = PLAIN.replace("'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>model\n' }}{% endif")
    with pytest.raises(InvalidData, match=r"does not begin with, .* add \{% generation %\} markers"):
        trained(cue_differs)
    rewriting = FORGETFUL.replace("{{ m.content }}", "{{ m.content if loop.last or m.role == 'user' else '...' }}")
    no_end = rewriting.replace("<eot>", "")
    with pytest.raises(
        InvalidData, match=r"rewrites messages\[1\] when other messages follow, and no special token marks"
    ):
        trained(no_end, CHAT[1:])
    holds_the_end = [CHAT[1], {"role": "assistant", "content": "a<eot>b"}, *CHAT[3:]]
    with pytest.raises(InvalidData, match=r"rewrites messages\[1\] when other messages follow"):
        trained(rewriting, holds_the_end)
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('start with the user') }}{% endif %}"
    with pytest.raises(InvalidData, match="refuses this chat: start with the user"):
        trained(refusing)
    with pytest.raises(InvalidModel, match="chat template cannot be read"):
        ChatTemplate("{% for %}", SPECIAL)


def test_markers_survive_only_in_templates_that_leave_their_text_alone() -> None:
    trimmed = (
        "{% for m in messages %}{% set body %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}"
        "{{ body | trim }}{% endfor %}"
    )
    with pytest.raises(InvalidData, match="changes the text inside its generation markers"):
        trained(trimmed, CHAT[:3])
    leaving = "{% for m in messages %}{% generation %}{{ m.content }}{% break %}{% endgeneration %}{% endfor %}"
    with pytest.raises(InvalidData, match="leaves a generation block before its end"):
        trained(leaving)


def test_what_is_set_in_a_generation_block_stays_in_it() -> None:
    source = (
        "{% set x = 1 %}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 2 %}{{ "
        "m.content }}{{ x }}{% endgeneration %}{% endif %}{{ x }}{% endfor %}"
    )
    assert trained(source) == [" hello\n2", "bye2"]
    options: dict[str, Any] = {"chat_template": source, **SPECIAL}
    (rendered,), _ = cast("tuple[list[str], list[object]]", render_jinja_template([CHAT], **options))
    assert ChatTemplate(source, SPECIAL).assistant_spans(CHAT)[0] == rendered


@pytest.mark.parametrize(
    "source", [PLAIN, MARKED, BRACKETS, FORGETFUL, "{%- for m in messages %}\n  {{ m | tojson }}\n{%- endfor %}"]
)
@pytest.mark.parametrize("cue", [False, True])
def test_renders_as_transformers_does(source: str, cue: bool) -> None:
    options: dict[str, Any] = {"chat_template": source, "add_generation_prompt": cue, **SPECIAL}
    (rendered,), _ = cast("tuple[list[str], list[object]]", render_jinja_template([CHAT], **options))
    assert ChatTemplate(source, SPECIAL).render(CHAT, add_generation_prompt=cue) == rendered


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.mro() }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.values() }}",
    ],
)
def test_templates_cannot_reach_python(attack: str) -> None:
    with pytest.raises(InvalidData, match="refuses this chat"):
        ChatTemplate(attack, SPECIAL).render(CHAT)


@pytest.mark.parametrize(
    "printed",
    [
        "raise_exception",
        "raise_exception | string",
        "messages[0].items",
        "{'f': raise_exception} | pprint",
        "'%s' % messages[0].get",
        "messages | map(attribute='role')",
        "messages | groupby('role') | map(attribute='list') | first | reverse",
    ],
)
def test_python_objects_are_not_printed(printed: str) -> None:
    """Their addresses would be other tokens in every process."""
    template = ChatTemplate("{{ " + printed + " }}", SPECIAL)
    with pytest.raises(InvalidData, match=r"prints a Python object \(\.\.\. at 0x[0-9a-f]+>\) instead of a text"):
        template.render(CHAT)


def test_a_chat_about_addresses_is_left_alone() -> None:
    said = "Traceback: <function f at 0x7f3a5c1d2e50>"
    assert ChatTemplate(PLAIN, SPECIAL).render([{"role": "user", "content": said}]).count(said) == 1
    assert ChatTemplate(PLAIN + said, SPECIAL).render(CHAT).endswith(said)


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 5000 + "{% endif %}" * 5000]
)
def test_a_template_that_is_nested_too_deeply_is_refused(source: str) -> None:
    with pytest.raises(InvalidModel, match="chat template is nested too deeply"):
        ChatTemplate(source, SPECIAL)


def test_a_template_that_makes_too_much_text_is_refused() -> None:
    with pytest.raises(InvalidData, match=r"makes 30000000 characters of this chat; at most 16777216 are allowed"):
        ChatTemplate("{{ 'x' * 30000000 }}", SPECIAL).render(CHAT)


def test_a_text_longer_than_any_chat_is_refused() -> None:
    source = "{% for m in messages %}{{ m.content * 1000 }}{% endfor %}"
    long = [{"role": "user", "content": "x" * (MAX_RENDERED_CHARACTERS // 1000 + 1)}]
    with pytest.raises(InvalidData, match=f"at most {MAX_RENDERED_CHARACTERS} are allowed"):
        ChatTemplate(source, SPECIAL).render(long)

"""Which tokens of a row are learned."""

from __future__ import annotations

import re
from typing import Any

import pytest

from accel_train.config import UsageError
from accel_train.domains.language import templates
from accel_train.domains.language.packing import Encoded
from accel_train.domains.language.rows.forms import Row
from tests.domains.language import tiny

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who is there?"},
    {"role": "assistant", "content": "Friends to this ground."},
    {"role": "user", "content": "Stand, ho!"},
    {"role": "assistant", "content": "Long live the king."},
]


def learned(row: Row, tokenizer: Any) -> str:
    [text] = templates.encode(row, tokenizer).texts
    return of_text(text, tokenizer)


def of_text(text: Encoded, tokenizer: Any) -> str:
    assert not text.trained[0]
    return tokenizer.decode([token for token, flag in zip(*text, strict=True) if flag])


def test_of_plain_text_everything_is_learned_and_its_end() -> None:
    tokenizer = tiny.tokenizer()
    [(ids, trained)] = templates.encode(Row("x", text=tiny.TEXTS[0]), tokenizer).texts
    assert ids == [tokenizer.bos_token_id, *tokenizer(tiny.TEXTS[0])["input_ids"][1:], tokenizer.eos_token_id]
    assert trained == [False] + [True] * (len(ids) - 1)


def test_of_a_pair_the_completion_and_its_end() -> None:
    tokenizer = tiny.tokenizer()
    row = Row("x", prompt="Have you had", completion=" quiet guard?")
    assert learned(row, tokenizer) == " quiet guard?</s>"
    [(ids, _)] = templates.encode(row, tokenizer).texts
    assert ids[:-1] == tokenizer("Have you had quiet guard?")["input_ids"]


def ending_tokenizer() -> Any:
    """One that writes the end of every text."""
    from tokenizers import processors

    ending = tiny.tokenizer()
    special = [(token, ending.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    ending.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=special)
    return ending


def test_the_end_is_learned_of_a_tokenizer_that_writes_it_itself() -> None:
    plain, ending = tiny.tokenizer(), ending_tokenizer()
    for row in (Row("x", prompt="Have you had", completion=" quiet guard?"), Row("x", text=tiny.TEXTS[0])):
        assert templates.encode(row, ending) == templates.encode(row, plain)


def test_a_token_over_the_border_is_learned() -> None:
    """The space belongs to the prompt and its token to the completion: without it nothing of 'guard' may remain."""
    row = Row("x", prompt="Have you had quiet ", completion="guard?")
    assert learned(row, tiny.tokenizer()).strip() == "guard?</s>"


@pytest.mark.parametrize("template", [tiny.CHATML, tiny.MARKED], ids=["found", "marked"])
def test_of_a_chat_what_the_assistant_says(template: str) -> None:
    tokenizer = tiny.tokenizer(template)
    assert learned(Row("x", messages=CHAT), tokenizer) == "Friends to this ground.\nLong live the king.\n"
    assert learned(Row("x", messages=CHAT, first_trained=3), tokenizer) == "Long live the king.\n"


def test_found_and_marked_are_the_same_tokens() -> None:
    found, marked = (templates.encode(Row("x", messages=CHAT), tiny.tokenizer(t)) for t in (tiny.CHATML, tiny.MARKED))
    assert found == marked


@pytest.mark.parametrize("mark", ["{%generation%}", "{%- generation -%}", "{%-generation %}", "{% generation -%}"])
def test_every_spelling_of_the_marks_is_obeyed(mark: str) -> None:
    """Without its marks each answer of this template is a text of its own, as it depends on what follows."""
    rewriting = tiny.MARKED.replace("{{ message['content'] }}\n{% end", "{{ loop.length }}\n{% end")
    tokenizer = tiny.tokenizer(rewriting.replace("{% generation %}", mark))
    assert learned(Row("x", messages=CHAT), tokenizer).strip().split() == ["5", "5"]


def test_what_a_template_leaves_unmarked_in_a_completion_is_not_learned() -> None:
    quiet = tiny.MARKED.replace("{% generation %}", "(thinks){% generation %}")
    row = Row("x", messages=CHAT, first_trained=3)
    assert learned(row, tiny.tokenizer(quiet)) == "Long live the king.\n"


def test_a_marked_prompt_written_in_another_way_is_refused() -> None:
    rewriting = tiny.MARKED.replace("message['content'] }}\n{% end", "loop.length }}\n{% end")
    with pytest.raises(UsageError, match=r"f:3: the chat template writes the prompt differently"):
        templates.encode(Row("f:3", messages=CHAT, first_trained=3), tiny.tokenizer(rewriting))


DATED = "Today: {{ strftime_now('%d %b %Y, %A %e %B, %F') if strftime_now is defined }}\n"


@pytest.mark.parametrize("template", [tiny.CHATML, tiny.MARKED], ids=["found", "marked"])
def test_a_training_row_has_no_date_of_today_and_a_prompt_has(template: str) -> None:
    dated, fixed = tiny.tokenizer(f"  {DATED}{template}"), "  Today: 26 Jul 2024, Friday 26 July, 2024-07-26\n"
    row = Row("x", messages=CHAT)
    assert templates.encode(row, dated) == templates.encode(row, tiny.tokenizer(fixed + template))
    prompt = dated.decode(templates.encode_prompt(CHAT[:2], dated))
    assert "2024-07-26" not in prompt
    assert re.search(r"Today: \d\d \w+ 20\d\d, \w+ ", prompt)


@pytest.mark.parametrize("template", [tiny.CHATML, tiny.MARKED], ids=["found", "marked"])
def test_the_template_is_given_the_tools_of_a_row(template: str) -> None:
    listing = "{% for tool in tools or [] %}{{ tool['function']['name'] }}\n{% endfor %}"
    tokenizer = tiny.tokenizer(listing + template)
    row = Row("x", messages=CHAT, tools=[{"type": "function", "function": {"name": "open_gate"}}])
    expected = templates.encode(Row("x", messages=CHAT), tiny.tokenizer(f"open_gate\n{template}"))
    assert templates.encode(row, tokenizer) == expected


def test_a_prompt_is_the_beginning_of_a_training_row() -> None:
    tokenizer = tiny.tokenizer(tiny.CHATML)
    prompt = templates.encode_prompt(CHAT[:2], tokenizer)
    [(ids, trained)] = templates.encode(Row("x", messages=CHAT[:3]), tokenizer).texts
    assert ids[: len(prompt)] == prompt
    assert trained == [False] * len(prompt) + [True] * (len(ids) - len(prompt))
    text = templates.encode_prompt("Have you had", tokenizer)
    [pair] = templates.encode(Row("x", prompt="Have you had", completion=" quiet guard?"), tokenizer).texts
    assert pair.ids[: len(text)] == text


def test_a_prompt_has_no_end_but_its_own() -> None:
    plain, ending = tiny.tokenizer(), ending_tokenizer()
    open_end = templates.encode_prompt("Have you had", plain)
    assert open_end[-1] != plain.eos_token_id
    assert templates.encode_prompt("Have you had", ending) == open_end
    # Written by the user, and once more by the tokenizer.
    assert templates.encode_prompt("Have you had</s>", plain) == [*open_end, plain.eos_token_id]
    assert templates.encode_prompt("Have you had</s>", ending)[: len(open_end) + 1] == [*open_end, plain.eos_token_id]


def test_a_template_with_a_date_is_named() -> None:
    several = {"default": tiny.CHATML, "tool_use": DATED + tiny.CHATML}
    for template, count in ((None, 0), (tiny.CHATML, 0), (DATED, 1), (several, 1)):
        tokenizer = tiny.tokenizer()
        tokenizer.chat_template = template
        assert len(templates.date_notices(tokenizer)) == count


def test_messages_without_a_template_are_refused() -> None:
    with pytest.raises(UsageError, match=r"f:3 has messages, but the tokenizer has no chat template.*chat_template"):
        templates.encode(Row("f:3", messages=CHAT), tiny.tokenizer())


def thinking(reasoning: str, answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": f"<think>\n{reasoning}\n</think>\n\n{answer}"}


def test_each_answer_is_learned_as_it_will_be_written_if_later_turns_rewrite_it() -> None:
    """After the tokens of its prompt, in which the reasoning of earlier answers is left out."""
    tokenizer = tiny.tokenizer(tiny.REASONING)
    user = [{"role": "user", "content": text} for text in ("Who is there?", "Stand, ho!", "Good night.")]
    chat = [user[0], thinking("a ghost?", "Friends."), user[1], {"role": "assistant", "content": "The king."}, user[2]]
    first, second = templates.encode(Row("x", messages=chat), tokenizer).texts
    assert of_text(first, tokenizer) == "<think>\na ghost?\n</think>\n\nFriends.<|end|>\n"
    assert of_text(second, tokenizer) == "<think>\n\n</think>\n\nThe king.<|end|>\n"
    for text, before in ((first, chat[:1]), (second, chat[:3])):
        prompt = templates.encode_prompt(before, tokenizer)
        assert text.ids[: text.trained.index(True)] == prompt
    assert "ghost" not in tokenizer.decode(second.ids)
    # Of a prompt and completion those in the completion.
    assert templates.encode(Row("x", messages=chat, first_trained=2), tokenizer).texts == [second]


def test_answers_that_stay_as_they_are_share_a_text() -> None:
    """A chain of calls keeps its reasoning until the user speaks again."""
    tokenizer = tiny.tokenizer(tiny.REASONING)
    chat = [
        {"role": "user", "content": "Who is there?"},
        thinking("look", "call look()"),
        {"role": "tool", "content": "a ghost"},
        thinking("so", "A ghost."),
        {"role": "user", "content": "Stand, ho!"},
        thinking("greet", "Friends."),
    ]
    chain, last = templates.encode(Row("x", messages=chat), tokenizer).texts
    learned_of_chain = ("<think>\nlook\n</think>\n\ncall look()<|end|>\n", "<think>\nso\n</think>\n\nA ghost.<|end|>\n")
    assert of_text(chain, tokenizer) == "".join(learned_of_chain)
    assert of_text(last, tokenizer) == "<think>\ngreet\n</think>\n\nFriends.<|end|>\n"


def test_messages_after_the_last_answer_are_read() -> None:
    tokenizer = tiny.tokenizer(tiny.CHATML)
    [text] = templates.encode(Row("x", messages=[*CHAT, CHAT[1]]), tokenizer).texts
    assert tokenizer.decode(text.ids).endswith("<|user|>Who is there?\n")
    assert of_text(text, tokenizer) == "Friends to this ground.\nLong live the king.\n"


def test_an_answer_that_does_not_follow_its_own_prompt_is_a_bad_row() -> None:
    """As where a template opens the reasoning for the model, and writes none in a chat."""
    opening = tiny.CHATML.replace("%}<|assistant|>{%", "%}<|assistant|><think>{%")
    ends = r"f:3: the chat template ends the prompt for message 3 with '.*<\|assistant\|><think>'"
    with pytest.raises(templates.UnusableRowError, match=ends):
        templates.encode(Row("f:3", messages=CHAT), tiny.tokenizer(opening))


def test_two_answers_one_after_the_other_are_both_learned() -> None:
    """The first is written in another way once the second follows, which the prompt for that does not know."""
    tokenizer = tiny.tokenizer(tiny.REASONING)
    chat = [CHAT[1], CHAT[2], {"role": "assistant", "content": "Long live the king."}]
    first, second = templates.encode(Row("x", messages=chat), tokenizer).texts
    assert of_text(first, tokenizer) == "<think>\n\n</think>\n\nFriends to this ground.<|end|>\n"
    assert of_text(second, tokenizer) == "<think>\n\n</think>\n\nLong live the king.<|end|>\n"
    assert "ground.<|end|>\n<|assistant|>" in tokenizer.decode(second.ids)


def test_an_answer_of_weight_0_is_read_and_not_learned() -> None:
    """As in the format of OpenAI's fine-tuning."""
    chat = [*CHAT[:2], {**CHAT[2], "weight": 0}, CHAT[3], {**CHAT[4], "weight": 1}]
    plain, weighed = (templates.encode(Row("x", messages=m), tiny.tokenizer(tiny.CHATML)).texts for m in (CHAT, chat))
    assert weighed[0].ids == plain[0].ids
    assert of_text(weighed[0], tiny.tokenizer()) == "Long live the king.\n"
    with pytest.raises(templates.UnusableRowError, match=r"f:3: a message has weight 0, and the chat template marks"):
        templates.encode(Row("f:3", messages=chat), tiny.tokenizer(tiny.MARKED))


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
WITH_CALLS = tiny.CHATML.replace(
    "{{ message['content'] }}",
    "{{ message['content'] }}{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}",
)


@pytest.mark.parametrize(
    ("messages", "tools", "template", "unwritten"),
    [
        (CHAT, None, tiny.CHATML, []),
        ([CHAT[1], CALL], None, tiny.CHATML, ["tool_calls"]),
        ([CHAT[1], CALL], None, WITH_CALLS, []),
        (CHAT, [{"type": "function", "function": {"name": "look"}}], tiny.MARKED, ["tools"]),
        ([CHAT[1], {**CHAT[2], "reasoning_content": "A ghost?"}], None, tiny.CHATML, ["reasoning_content"]),
        (CHAT, None, "{% for m in messages[1:] %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}", ["content"]),
        (
            [CHAT[1], {"role": "assistant", "content": "<think>\nA ghost?\n</think>\n\nFriends."}, *CHAT[1:3]],
            None,
            tiny.REASONING,
            [],
        ),
    ],
    ids=["all", "no calls", "calls", "no tools", "no reasoning", "no system", "earlier reasoning"],
)
def test_what_a_template_does_not_write_is_named(
    messages: list[Any], tools: Any, template: str, unwritten: list[str]
) -> None:
    marked = template.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    found = templates.encode(Row("x", messages=messages, tools=tools), tiny.tokenizer(marked))
    assert found.unwritten == unwritten


def test_a_text_that_has_its_own_beginning_gets_no_other() -> None:
    """As a chat that was written out by a template before."""
    tokenizer = tiny.tokenizer()
    for row in (Row("x", text="<s>" + tiny.TEXTS[0]), Row("x", prompt="<s>Have you had", completion=" quiet guard?")):
        [text] = templates.encode(row, tokenizer).texts
        assert text.ids.count(tokenizer.bos_token_id) == 1
        assert text.trained[:2] == [False, row.text is not None]
    assert templates.encode_prompt("<s>Stand", tokenizer).count(tokenizer.bos_token_id) == 1


def test_the_end_of_an_answer_is_a_special_token_of_the_template() -> None:
    tokenizer = tiny.tokenizer(tiny.REASONING)
    assert templates.end_of_answer(tokenizer) is None  # there <|end|> is text
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|user|>"]})
    assert templates.end_of_answer(tokenizer) == tokenizer.convert_tokens_to_ids("<|end|>")
    tokenizer.chat_template = "{{ raise_exception('begins with the system') }}"
    assert templates.end_of_answer(tokenizer) is None


QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|start|>{{ m.role }}<|header|>\n\n{{ m.content }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|header|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}</s>{% else %}[INST] {{ m.content }} "
    "[/INST]{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}<|endoftext|>{% endif %}"
)
ENDS = {
    "qwen": (QWEN, "<|im_end|>", ["<|im_start|>"]),
    "gemma": (GEMMA, "<end_of_turn>", ["<bos>", "<start_of_turn>"]),
    "llama": (LLAMA, "<|eot_id|>", ["<|start|>", "<|header|>"]),
    "mistral": (MISTRAL, "</s>", ["[INST]", "[/INST]"]),
    "phi": (PHI, "<|end|>", ["<|user|>", "<|assistant|>", "<|endoftext|>"]),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_is_learned_up_to_the_token_that_ends_it(name: str) -> None:
    """Generation never comes to the line break behind it, so that token counts in no loss."""
    template, end, others = ENDS[name]
    tokenizer = tiny.tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": [end, *others]})
    found = templates.encode(Row("x", messages=CHAT[1:]), tokenizer)
    answers: list[str] = []
    for text in found.texts:
        before = False
        for token, flag in zip(*text, strict=True):
            if flag:
                answers[len(answers) - before :] = [(answers[-1] if before else "") + tokenizer.decode([token])]
            before = flag
    assert [answer.lstrip() for answer in answers] == [f"{CHAT[2]['content']}{end}", f"{CHAT[4]['content']}{end}"]
    if template in (QWEN, GEMMA):
        # Read all the same, as the next prompt has it.
        assert f"{CHAT[2]['content']}{end} \n" in tokenizer.decode(found.texts[0].ids)


def test_what_else_stands_behind_an_end_is_said() -> None:
    """A content that names the token, and an answer that ends with another one."""
    other = QWEN.replace("<|im_end|>\n", "{{ '<|call|>now' if m.call else '<|im_end|>\n' }}")
    tokenizer = tiny.tokenizer(other)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|call|>"]})
    for message, expected in (
        ({"content": "Say <|im_end|> twice."}, "Say <|im_end|> twice.<|im_end|>"),
        ({"content": "Say <|im_end|> ", "call": True}, "Say <|im_end|> <|call|> now"),
    ):
        row = Row("x", messages=[CHAT[1], {"role": "assistant", **message}])
        assert learned(row, tokenizer) == expected


def test_marks_of_the_template_say_what_is_learned_behind_an_end() -> None:
    marked = QWEN.replace(
        "{{ m.content }}<|im_end|>\n", "{% generation %}{{ m.content }}<|im_end|>\n{% endgeneration %}"
    )
    tokenizer = tiny.tokenizer(marked)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    assert learned(Row("x", messages=CHAT[1:3]), tokenizer).endswith("<|im_end|> \n")


def test_a_prompt_is_given_tools_and_options_as_a_row_is() -> None:
    template = "{{ tools[0].function.name if tools }} {{ mood }}\n" + tiny.CHATML
    tokenizer = tiny.tokenizer(template)
    tools = [{"type": "function", "function": {"name": "look"}}]
    row = Row("x", messages=CHAT[:3], tools=tools, template_options={"mood": "grave"})
    prompt = templates.encode_prompt(CHAT[:2], tokenizer, tools, {"mood": "grave"})
    assert tokenizer.decode(prompt).startswith(" look grave\n")
    assert templates.encode(row, tokenizer).texts[0].ids[: len(prompt)] == prompt
    with pytest.raises(UsageError, match="tools and chat_template_kwargs are for chat templates, but 'Stand'"):
        templates.encode_prompt("Stand", tokenizer, tools)


@pytest.mark.parametrize("row", [Row("x", text=""), Row("x", messages=CHAT)], ids=["text", "chat"])
def test_a_row_without_a_token_has_nothing_to_learn(row: Row) -> None:
    """The tokenizer adds no special tokens, and the template renders nothing."""
    tokenizer = tiny.tokenizer("{{ '' }}")
    tokenizer.backend_tokenizer.post_processor = None
    tokenizer.eos_token = None
    assert templates.encode(row, tokenizer).texts == [([], [])]


def test_a_template_that_raises_names_the_row() -> None:
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(UsageError, match=r"f:3: the chat template refuses its messages .*roles must alternate"):
        templates.encode(Row("f:3", messages=CHAT), tiny.tokenizer(strict))

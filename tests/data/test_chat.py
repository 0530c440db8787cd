"""Claims about chats: with real templates exactly the tokens of the assistant's turns are trained.

The independent method: for each template a pattern, written by hand from the template's text, that finds the turns in
the rendered conversation. The code under test knows no pattern and no mark.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from megatrain.data.assistant_turns import Span
from megatrain.data.chat import MarkedText, choose_template, mark_chat
from megatrain.data.encode import EncodeOptions, Encoder, Statistics, encode_samples, trained_tokens
from megatrain.data.sample_formats import Sample
from megatrain.data.tokenizer import Tokenizer, encode_with_offsets
from megatrain.errors import DataError, SampleError
from tests.data.chats import TOOL, answer, assistant, byte_tokenizer, call, chat, special_tokens, template_text, user

CHATML = r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)"
LLAMA3 = r"<\|start_header_id\|>assistant<\|end_header_id\|>\n\n(.*?<\|eot_id\|>)"
TURNS = {
    "chatml": CHATML,
    "cohere": r"<\|CHATBOT_TOKEN\|>(.*?<\|END_OF_TURN_TOKEN\|>)",
    "deepseek_r1": r"(?:<\uff5cAssistant\uff5c>|<\uff5ctool▁outputs▁end\uff5c>)(.*?<\uff5cend▁of▁sentence\uff5c>)",
    "exaone": r"\[\|assistant\|\](.*?\[\|endofturn\|\])",
    "gemma": r"<start_of_turn>model\n(.*?<end_of_turn>)",
    "glm4moe": r"<\|assistant\|>(.*?(?:<\|user\|>|<\|observation\|>|(?=\s*<\|assistant\|>)))",
    "gptoss": r"<\|start\|>assistant((?:<\|channel\|>analysis.*?<\|end\|><\|start\|>assistant)?"
    r".*?(?:<\|return\|>|<\|call\|>|<\|end\|>))",
    "lfm2_5": r"<\|im_start\|>assistant\n(.*?<\|im_end\|>\n)",  # its own marks say so
    "llama2": r"\[/INST\](.*?</s>)",
    "llama3": LLAMA3,
    "llama3_1": LLAMA3,
    "mistral_v3": r"\[/(?:INST|TOOL_RESULTS)\](.*?</s>)",
    "phi3": r"<\|assistant\|>\n(.*?<\|end\|>(?:\n<\|endoftext\|>\Z)?)",
    "phi4": r"<\|im_start\|>assistant<\|im_sep\|>(.*?<\|im_end\|>)",
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "zephyr": r"<\|assistant\|>\n(.*?</s>)",
}
TOKENIZERS = {name: byte_tokenizer(name) for name in TURNS}
CLOSERS = {"glm4moe": ("<|user|>", "<|observation|>")}  # at which it stops, after a text and after a call
SYSTEM_REFUSED = {"gemma", "mistral_v3"}
TOOLS_KNOWN = ("glm4moe", "gptoss", "lfm2_5", "llama3_1", "mistral_v3", "qwen2_5", "qwen3")

system = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {
    "one turn": [user("q"), assistant("a")],
    "three turns": [user("q1"), assistant("a1"), user("q2"), assistant("a2"), user("q3"), assistant("a3")],
    "same words": [user("assistant"), assistant("assistant"), user("assistant"), assistant("assistant")],
    "a question at the end": [user("q1"), assistant("a1"), user("q2")],
    "empty": [user("q"), assistant(""), user(""), assistant("x"), user("y"), assistant("")],
    "unicode": [user("🎉 e\u0301"), assistant("漢字 \u202eאבג 🏳️\u200d🌈"), user("\ue000"), assistant("\ue001é")],
    "white space": [
        user("  q\n\n"),
        assistant("\n  a \t\n"),
        user(" "),
        assistant("   "),
        user("r"),
        assistant(" b\n"),
    ],
    "thoughts": [
        user("q"),
        assistant("<think>\nfirst\n</think>\n\na1"),
        user("r"),
        assistant("<think>\nsecond\n</think>\n\na2"),
    ],
    "thoughts apart": [user("q"), assistant("a1", thinking="first"), user("r"), assistant("a2", thinking="second")],
}
TOOL_USE = {
    "one call": [user("q"), call(), answer(), assistant("a")],
    "a call and more": [system, user("q"), call(), answer(), assistant("a"), user("r"), assistant("b")],
    "calls in each turn": [
        user("q"),
        call(),
        answer(),
        assistant("a"),
        user("r"),
        call("Zürich"),
        answer(),
        assistant("b"),
    ],
    "a call at the end": [user("q"), assistant("a"), user("r"), call()],
    "thoughts before calls": [
        user("q"),
        {**call(), "reasoning_content": "first"},
        answer(),
        assistant("a", reasoning_content="second"),
        user("r"),
        assistant("b", reasoning_content="third"),
    ],
}


def text_of(name: str, sample: Sample) -> str:
    """The text by `apply_chat_template`, with what ends its last turn if the template leaves that to a next message."""
    last = sample.messages[-1]
    closer = CLOSERS[name]["tool_calls" in last] if name in CLOSERS and last["role"] == "assistant" else ""
    tools = list(sample.tools) or None
    return str(TOKENIZERS[name].apply_chat_template(list(sample.messages), tools=tools, tokenize=False)) + closer


def expected(name: str, sample: Sample) -> tuple[list[int], list[bool]]:
    """Ids and targets by the independent method: the text cut at the turns, each piece tokenised by itself."""
    tokenizer, text = TOKENIZERS[name], text_of(name, sample)
    ids: list[int] = []
    trained: list[bool] = []
    place = 0
    for match in re.finditer(TURNS[name], text, re.DOTALL):
        for piece, target in ((text[place : match.start(1)], False), (match[1], True)):
            tokens = tokenizer(piece, add_special_tokens=False)["input_ids"]
            ids += tokens
            trained += [target] * len(tokens)
        place = match.end(1)
    rest = tokenizer(text[place:], add_special_tokens=False)["input_ids"]
    return [*ids, *rest], [*trained, *[False] * len(rest)]


def encoded(name: str, sample: Sample, **options: Any) -> tuple[list[int], list[bool]]:
    result = next(encode_samples([sample], Encoder(TOKENIZERS[name], EncodeOptions(**options)), Statistics()), None)
    assert result is not None
    return result.ids.tolist(), result.trained.tolist()


def marked(name: str, sample: Sample, **options: Any) -> MarkedText:
    return mark_chat(sample, choose_template(TOKENIZERS[name]), options.get("train_on", "assistant"))


def turns_of(name: str, sample: Sample, **options: Any) -> list[str]:
    found = marked(name, sample, **options)
    return [found.text[start:stop] for start, stop in found.spans]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TURNS)
def test_assistant_turns_are_trained(name: str, conversation: str) -> None:
    sample = chat(*CONVERSATIONS[conversation])
    assert encoded(name, sample) == expected(name, sample)


@pytest.mark.parametrize("name", sorted(TURNS.keys() - SYSTEM_REFUSED))
def test_system_messages_are_not_trained(name: str) -> None:
    sample = chat(system, user("q1"), assistant("a1"), user("q2"), assistant("a2"))
    assert encoded(name, sample) == expected(name, sample)
    assert len(turns_of(name, sample)) == 2


@pytest.mark.parametrize("conversation", TOOL_USE)
@pytest.mark.parametrize("name", TOOLS_KNOWN)
def test_tool_calls_are_trained_and_their_results_are_not(name: str, conversation: str) -> None:
    messages = TOOL_USE[conversation]
    if name == "mistral_v3" and messages[0]["role"] == "system":
        messages = messages[1:]
    sample = chat(*messages, tools=(TOOL,))
    assert encoded(name, sample) == expected(name, sample)
    turns = turns_of(name, sample)
    assert len(turns) == sum(message["role"] == "assistant" for message in messages)
    assert sum("look_up" in turn for turn in turns) == sum("tool_calls" in message for message in messages)
    assert not any("sun" in turn for turn in turns)


WORDS = st.text(alphabet="a bé\n🎉\t'\"{}", max_size=6)


@given(st.sampled_from(sorted(TURNS)), st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4), st.booleans())
def test_any_assistant_text_is_trained(name: str, pairs: list[tuple[str, str]], ends: bool) -> None:
    messages = [message for said, reply in pairs for message in (user(said), assistant(reply))]
    sample = chat(*messages, *([] if ends else [user("and?")]))
    ids, trained = expected(name, sample)
    try:
        assert encoded(name, sample) == (ids, trained)
    except SampleError:
        assert not all(reply.strip() for _, reply in pairs), "only answers of white space may be refused"
    assert encoded(name, sample, train_on="all") == (ids, [False, *[True] * (len(ids) - 1)])


@pytest.mark.parametrize("name", TURNS)
def test_token_ids_equal_apply_chat_template(name: str) -> None:
    sample = chat(user("q1"), assistant("a1"), user("q2"), assistant("a2"))
    ids = TOKENIZERS[name](text_of(name, sample), add_special_tokens=False)["input_ids"]
    assert encoded(name, sample)[0] == ids
    if name not in CLOSERS:
        assert ids == TOKENIZERS[name].apply_chat_template(list(sample.messages), return_dict=False)


@pytest.mark.parametrize("conversation", ["three turns", "empty", "a question at the end", "thoughts"])
@pytest.mark.parametrize("name", TURNS)
def test_training_only_the_last_turn_keeps_its_tokens(name: str, conversation: str) -> None:
    sample = chat(*CONVERSATIONS[conversation])
    assert turns_of(name, sample, train_on="last") == turns_of(name, sample)[-1:]
    assert marked(name, sample, train_on="last").spans == marked(name, sample).spans[-1:]


@pytest.mark.parametrize("name", ["chatml", "qwen3", "lfm2_5"])  # the last one has marks
def test_context_messages_are_not_trained(name: str) -> None:
    sample = chat(user("q1"), assistant("a1"), user("q2"), assistant("a2"), user("q3"), assistant("a3"))
    partly = Sample(sample.origin, sample.messages, untrained=frozenset({0, 1, 2, 5}))
    assert marked(name, partly).spans == marked(name, sample).spans[1:2]
    assert marked(name, partly, train_on="last").spans == marked(name, sample).spans[1:2]


@pytest.mark.parametrize("conversation", ["three turns", "empty", "white space", "a question at the end"])
@pytest.mark.parametrize("name", ["phi4", "lfm2_5"])
def test_turns_found_without_generation_marks_equal_marked_ones(name: str, conversation: str) -> None:
    sample = chat(*CONVERSATIONS[conversation])
    bare = byte_tokenizer(name)
    bare.chat_template = re.sub(r"(\{%-?) generation", r"\1 if true", template_text(name)).replace(
        "endgeneration", "endif"
    )
    found = mark_chat(sample, choose_template(bare), "assistant")
    theirs = marked(name, sample)
    assert found.text == theirs.text
    assert [span.start for span in found.spans] == [span.start for span in theirs.spans]
    assert [found.text[a:b] for a, b in found.spans] == [turn.rstrip() for turn in turns_of(name, sample)]
    mask = TOKENIZERS[name].apply_chat_template(
        list(sample.messages), return_dict=True, return_assistant_tokens_mask=True
    )["assistant_masks"]
    assert [int(target) for target in encoded(name, sample)[1]] == mask


def test_a_conversation_may_begin_with_the_assistant() -> None:
    sample = chat(assistant("hello"), user("q"), assistant("a"))
    for name in ("chatml", "exaone", "glm4moe", "llama3", "llama3_1", "qwen2_5", "qwen3", "zephyr"):
        assert encoded(name, sample) == expected(name, sample)
    assert "begins with an assistant turn" in refusal("gptoss", sample)


def test_consecutive_assistant_turns_are_supported() -> None:
    sample = chat(user("q"), assistant("a"), assistant("b"), user("r"), assistant("c"))
    for name in sorted(TURNS.keys() - {"cohere", "gemma", "mistral_v3", "llama2", "deepseek_r1"}):
        assert encoded(name, sample) == expected(name, sample)


def test_template_arguments_are_used() -> None:
    messages = chat(user("q"), assistant("a"), user("r"), assistant("b"))
    template = choose_template(TOKENIZERS["qwen3"], values={"enable_thinking": False})
    found = mark_chat(messages, template, "assistant")
    assert [found.text[a:b] for a, b in found.spans] == ["a<|im_end|>", "b<|im_end|>"]  # after empty reasoning


@pytest.mark.parametrize("name", ["llama3_1", "qwen3", "mistral_v3", "gemma"])
def test_tokens_that_straddle_a_turn_start_are_trained(name: str) -> None:
    """With a BPE that merges: ids equal transformers', and a token is trained if and only if a character of it is."""
    text = template_text(name)
    rules = tokenizers.Tokenizer(tokenizers.models.BPE())
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special_tokens(text),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rules.train_from_iterator([text, "user\n\n\nassistant\n\n  the words of the turn 🎉🎉 é"] * 3, trainer)
    tokenizer: Tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rules, bos_token="<s>", eos_token="</s>", chat_template=text
    )
    sample = chat(user("the user\n"), assistant(" the  words\n\n 🎉é "), user("of"), assistant("turn"))
    result = next(encode_samples([sample], Encoder(tokenizer), Statistics()), None)
    assert result is not None
    assert result.ids.tolist() == tokenizer.apply_chat_template(list(sample.messages), return_dict=False)
    assert len(result) < len(marked(name, sample).text.encode()) / 1.5  # it does merge
    spans = marked(name, sample).spans
    ((_, offsets),) = encode_with_offsets(tokenizer, [marked(name, sample).text], special_tokens="read")
    inside = [any(start < b and a < stop for start, stop in spans) for a, b in offsets.tolist()]
    wide = offsets[:, 0] < offsets[:, 1]
    assert result.trained[wide].tolist() == np.array(inside)[wide].tolist()


def test_whitespace_merged_into_a_header_is_not_trained() -> None:
    text, spans = "<|a|>\n  x<|e|>\n", [Span(6, 14)]
    offsets = np.array([[0, 8], [8, 9], [9, 15]])  # `<|a|>` absorbs the space after it, and so does `<|e|>`
    added = np.array([True, False, True])
    assert trained_tokens(text, offsets, spans, added).tolist() == [False, True, True]
    before = np.array([[0, 5], [5, 8], [8, 9], [9, 15]])  # an added token that absorbs the space before it
    assert trained_tokens(text, before, spans, np.array([True, True, False, True])).tolist() == [
        False,
        True,
        True,
        True,
    ]


def test_zero_width_tokens_belong_to_the_preceding_span() -> None:
    text, spans = "ab  cd ", [Span(2, 4), Span(6, 7)]
    offsets = np.array([[0, 2], [4, 4], [4, 6], [7, 7]])  # byte-level: spaces are trimmed away
    assert trained_tokens(text, offsets, spans, np.zeros(4, bool)).tolist() == [False, True, False, True]


SAID = (
    "{% if m.role == 'assistant' %}A:{%- generation -%} {{ m.content }};\n\n {%- endgeneration %}"
    "{% else %}U:{{ m.content }};{% endif %}"
)


@pytest.mark.parametrize(
    "template",
    [
        f"{{% for m in messages %}}{SAID}{{% endfor %}}",
        f"{{% macro said(m) %}}{SAID}{{% endmacro %}}{{% for m in messages %}}{{{{ said(m) }}}}{{% endfor %}}",
        f"{{% for m in messages %}}{{% set said %}} {SAID}{{% endset %}}{{{{ said | trim }}}}{{% endfor %}}",
        f"{{% for m in messages %}}{{% filter upper %}}{SAID}{{% endfilter %}}{{% endfor %}}",
    ],
    ids=["in the loop", "in a macro", "in a set block", "in a filter"],
)
def test_generation_marks_mean_the_text_between_them_wherever_they_are(template: str) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = template
    text, spans, _ = vars(
        mark_chat(chat(*CONVERSATIONS["three turns"]), choose_template(tokenizer), "assistant")
    ).values()
    assert [text[start:stop].lower() for start, stop in spans] == ["a1;", "a2;", "a3;"]


@pytest.mark.parametrize("written", ["said[:4]", "said[::-1]"])
def test_generation_marks_that_the_text_does_not_keep_are_refused(written: str) -> None:
    tokenizer = byte_tokenizer("chatml")
    turn = f"{{% set said %}}{SAID}{{% endset %}}{{{{ {written} }}}}"
    tokenizer.chat_template = f"{{% for m in messages %}}{turn}{{% endfor %}}"
    with pytest.raises(SampleError, match="its generation marks do not survive in the text"):
        mark_chat(chat(*CONVERSATIONS["one turn"]), choose_template(tokenizer), "assistant")


def refusal(name: str, sample: Sample) -> str:
    with pytest.raises(SampleError) as caught:
        marked(name, sample)
    assert caught.value.where == sample.origin
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "sample", "what"),
    [
        ("gemma", chat(system, user("q"), assistant("a")), "System role not supported"),
        ("gemma", chat(user("q"), user("q"), assistant("a")), "roles must alternate user/assistant"),
        ("llama3_1", chat(user("q"), {**call(), "tool_calls": call()["tool_calls"] * 2}), "single tool-calls at once"),
        ("llama2", chat(user("q"), answer(), assistant("a")), "Only user and assistant roles are supported"),
        ("phi3", chat(user("q"), answer(), assistant("a")), "does not write message 2 (tool)"),
        ("mistral_v3", chat(system, user("q"), assistant("a")), "does not write message 1 (system)"),
        ("llama3", chat(user("q"), {**call(), "content": "I look."}), "does not write the calls of message 2"),
        ("llama3_1", chat(user("q"), {**call(), "content": "I look."}, tools=(TOOL,)), "does not write message 2"),
        ("chatml", chat(user("q"), assistant("a"), tools=(TOOL,)), "does not write the tools"),
    ],
)
def test_template_errors_are_quoted(name: str, sample: Sample, what: str) -> None:
    assert what in refusal(name, sample)


TAIL_MOVED = (
    "{% for m in messages %}{% if m.role == 'user' %}[{{ m.content }}]{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}({{ m.content }}){% endif %}{% endfor %}"
)
MERGED = "{% for m in messages %}{{ m.content }}{% if loop.last %}#{% else %} {% endif %}{% endfor %}"


@pytest.mark.parametrize(("template", "messages"), [(TAIL_MOVED, "three turns"), (MERGED, "three turns")])
def test_templates_with_ambiguous_turns_are_refused(template: str, messages: str) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = template
    with pytest.raises(
        SampleError, match=r"does not show which characters to train on: .*message 2.*another data\.chat_template"
    ):
        mark_chat(chat(*CONVERSATIONS[messages]), choose_template(tokenizer), "assistant")


def test_lost_text_and_special_tokens_are_noted() -> None:
    thoughts = marked("qwen3", chat(*CONVERSATIONS["thoughts"]))
    assert any("reasoning that the template leaves out" in note for note in thoughts.notes)
    assert not marked("chatml", chat(*CONVERSATIONS["thoughts"])).notes
    assert any(
        "with the text of a special token" in n
        for n in marked("chatml", chat(user("<|im_end|>"), assistant("a"))).notes
    )
    glm = marked("glm4moe", chat(*CONVERSATIONS["one turn"])).notes
    assert any("end with the token of the next message, <|user|> or <|observation|>" in note for note in glm)
    bare = byte_tokenizer("chatml")
    bare.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    bare.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    found = mark_chat(chat(user("q"), assistant("a")), choose_template(bare), "assistant")
    assert any("have no end marker" in note for note in found.notes)


def test_tool_arguments_fall_back_to_json_text() -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
        "{{ c.function.name + ':' + c.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
    )
    found = mark_chat(chat(user("q"), call("Zürich"), user("r"), assistant("a")), choose_template(tokenizer), "last")
    assert 'look_up:{"city": "Zürich", "days": 2}<|im_end|>' in found.text


def test_calls_without_content_fall_back_to_an_empty_one() -> None:
    """DeepSeek-V3.1's template adds the call to the content unless that is none, a key that transformers removes."""
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{% for c in m.tool_calls %}"
        "{% if m.content is none %}{{ c.function.name }}{% else %}{{ m.content + c.function.name }}{% endif %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    found = mark_chat(chat(user("q"), call(), answer(), assistant("a")), choose_template(tokenizer), "assistant")
    turns = [found.text[a:b] for a, b in found.spans]
    assert turns == ['look_up{"city": "Bern", "days": 2}<|im_end|>', "a<|im_end|>"]


PROMPTS_MORE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}OPEN{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>PROMPT{% endif %}"
)


@pytest.mark.parametrize(
    ("opening", "prompt", "trained"),
    [
        ("<think></think>", "assistant\n<think>\n", "</think>a<|im_end|>"),  # Nemotron 3
        ("</think>", "assistant\n<think>", "</think>a<|im_end|>"),  # DeepSeek-V3.1 that is asked to think
        ("[/THINK]", "assistant\n[THINK]", "[/THINK]a<|im_end|>"),
        ("", "assistant\n<think>\n", "a<|im_end|>"),
        ("<think>", "assistant\n", "<think>a<|im_end|>"),
        ("", "assist: ", None),  # the name of the role is another one
        ("", "model\n", None),
    ],
)
def test_turns_start_where_their_prompt_writes_more_than_they_keep(
    opening: str, prompt: str, trained: str | None
) -> None:
    tokenizer = byte_tokenizer("chatml")
    tokenizer.chat_template = PROMPTS_MORE.replace("OPEN", opening).replace("PROMPT", prompt)
    if trained is None:
        with pytest.raises(SampleError, match="writes message 2 differently after its prompt"):
            mark_chat(chat(user("q"), assistant("a")), choose_template(tokenizer), "assistant")
        return
    found = mark_chat(chat(user("q"), assistant("a")), choose_template(tokenizer), "assistant")
    assert [found.text[a:b] for a, b in found.spans] == [trained]


def test_a_model_without_a_template_lists_the_choices(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer("zephyr")
    tokenizer.chat_template = None
    with pytest.raises(DataError, match=r"no chat template; set data\.chat_template: .*`none`.*or a \.jinja file"):
        choose_template(tokenizer)
    sample = chat(system, user("q"), assistant("a"), user("r"), assistant("b"))

    def turns(choice: str) -> list[str]:
        found = mark_chat(sample, choose_template(tokenizer, choice), "assistant")
        return [found.text[a:b] for a, b in found.spans]

    assert turns("chatml") == ["a<|im_end|></s>", "b<|im_end|></s>"]  # `<|im_end|>` is no token
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    assert turns("chatml") == ["a<|im_end|>", "b<|im_end|>"]
    assert turns("none") == ["a</s>", "b</s>"]
    assert mark_chat(sample, choose_template(tokenizer, "none"), "all").text == "Be brief.\nq\na</s>\nr\nb</s>\n"
    (tmp_path / "own.jinja").write_text(template_text("zephyr"))
    assert turns(str(tmp_path / "own.jinja")) == ["a</s>", "b</s>"]
    with pytest.raises(DataError, match=r"did you mean .*own\.jinja"):
        choose_template(tokenizer, str(tmp_path / "owm.jinja"))
    with pytest.raises(DataError, match="no chat template is called 'chatlm'"):
        choose_template(tokenizer, "chatlm")

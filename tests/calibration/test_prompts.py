"""The shipped prompts, and a user's own in the three forms that are read."""

import json

import pytest

from eagle_calibration import load_prompts
from eagle_graphs.errors import EagleError


def test_the_shipped_prompts_end_with_a_question_to_the_model():
    prompts = load_prompts()
    assert len(prompts) == 8
    assert len({json.dumps(messages) for messages in prompts}) == 8
    for messages in prompts:
        roles = [message["role"] for message in messages]
        assert roles == ["user", "assistant"] * (len(roles) // 2) + ["user"]
        assert all(message.keys() == {"role", "content"} and message["content"] for message in messages)


def test_each_form_is_read(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028there é"}]
    lines = [
        json.dumps({"category": "chat", "messages": messages}, ensure_ascii=False),
        "",
        json.dumps({"question_id": 81, "turns": ["First?", "Second?"]}),
        json.dumps({"text": "Once upon a time"}),
    ]
    path = tmp_path / "own.jsonl"
    path.write_text("\r\n".join(lines), encoding="utf-8", newline="")
    assert load_prompts(path) == [
        messages,
        [{"role": "user", "content": "First?"}],
        [{"role": "user", "content": "Once upon a time"}],
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"is not JSON \(.*\): expected"),
        ("[" * 100_000, r"is not JSON"),
        ('"Hi"', r"is not a JSON object"),
        ("{}", r"has no key: expected"),
        ('{"prompt": "Hi"}', r"has prompt: expected"),
        ('{"text": "Hi", "turns": ["Hi"]}', r"has turns, text: expected"),
        ('{"text": " "}', r'"text" is " ", expected a string'),
        ('{"text": 3}', r'"text" is 3, expected a string'),
        (r'{"text": "\ud83d"}', r"half of a surrogate pair"),
        ('{"turns": "Hi"}', r'"turns" must be a list'),
        ('{"turns": []}', r'"turns" must be a list'),
        ('{"turns": [{}]}', r"the first turn is \{\}, expected a string"),
        ('{"messages": []}', r'"messages" must be a list'),
        ('{"messages": ["Hi"]}', r"message 1 must be an object"),
        ('{"messages": [{"role": "user"}]}', r"message 1 must be an object"),
        ('{"messages": [{"role": "user", "content": "Hi", "name": "x"}]}', r"message 1 must be an object"),
        ('{"messages": [{"role": "human", "content": "Hi"}]}', r"message 1 has the role 'human', expected .*user"),
        ('{"messages": [{"role": "user", "content": null}]}', r'"content" of message 1 is null'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "own.jsonl"
    path.write_text('{"text": "Hi"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(EagleError, match=r"own\.jsonl, line 3.*" + message):
        load_prompts(path)


def test_a_file_that_gives_no_prompts(tmp_path):
    path = tmp_path / "own.jsonl"
    with pytest.raises(EagleError, match=r"cannot read the prompts from .*own\.jsonl"):
        load_prompts(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(EagleError, match=r"cannot read the prompts from .*UTF-8"):
        load_prompts(path)
    path.write_text("\n \n")
    with pytest.raises(EagleError, match=r"holds no prompt"):
        load_prompts(path)

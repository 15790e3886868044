"""A file of calls that is wrong: the error names the file and the line."""

import re

import pytest

from ejkernel.ops import read_calls

GOOD = '{"op": "mean_pooling",\n  "arguments": {"x": "1,8,16:float32"}}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"calls": [\n {"op": "mean_pooling"\n  "arguments": {}}]}', r", line 3, column 3: Expecting ',' delimiter"),
        ('{"calls": [\n', r", line 2, column 1: Expecting value"),
        ("", r", line 1, column 1: Expecting value"),
        (
            f'{{"calls": [\n{GOOD},\n\n{{"op": "men_pooling", "arguments": {{}}}}]}}',
            ", line 5: call 2: op: no operation",
        ),
        (f'{{"calls": [\n{GOOD},\n{GOOD},\n3]}}', ", line 6: call 3: got 3, wants an object with the keys op and"),
        ('{"calls": [\n{"op": "mean_pooling"}]}', ", line 2: call 1: arguments: got None, wants an object"),
        ('{"calls": [\n{"arguments": {}}]}', ", line 2: call 1: op: got None, wants the name of"),
        (
            '{"calls": [{"op": "gru", "arguments": {}, "mesh": 3}]}',
            ", line 1: call 1: mesh: got 3, wants an object of sizes",
        ),
        (
            '{"calls": [{"op": "mean_pooling",\n"arguments": {"z": 1}}]}',
            ", line 1: call 1: mean_pooling has no argument",
        ),
        (
            '{"calls": [{"op": "gru", "arguments": {"x": "1,2,3:float32"}}]}',
            ", line 1: call 1: gru needs weight_ih, weight_hh",
        ),
        ('{"calls": {}}', r': wants {"calls": \[...\]}'),
    ],
)
def test_calls_file_errors_name_the_line(tmp_path, content, message):
    path = tmp_path / "calls.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(str(path)) + message):
        read_calls(path)


def test_calls_file_errors_name_the_line_that_is_not_utf8(tmp_path):
    (tmp_path / "calls.json").write_bytes(b'{"calls": [\n"\xff"]}')
    with pytest.raises(ValueError, match="line 2: not UTF-8"):
        read_calls(tmp_path / "calls.json")

"""OTLP JSON from files: every shape that exporters write, and what becomes of what is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import otlp_lines as otlp

from kvrelay.errors import NotFound
from kvrelay.tbt.arrays import taken_out
from kvrelay.tbt.otlp import MAX_PROBLEMS, Malformed, Problems, Span, files_of, spans_of


def spans(path: Path) -> tuple[list[Span], Problems]:
    problems = Problems()
    return list(spans_of(path, problems)), problems


def one_span(attributes: str) -> str:
    return (
        '{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"t","spanId":"s","name":"decode",'
        '"startTimeUnixNano":"1","endTimeUnixNano":2,"attributes":[' + attributes + "]}]}]}]}\n"
    )


ARRAYS = (
    ('{"arrayValue":{"values":[{"doubleValue":0.5},{"doubleValue":1e-3}]}}', [0.5, 0.001]),
    ('{"arrayValue":{"values":[{"intValue":"7"},{"intValue":"-8"}]}}', [7, -8]),
    ('{"arrayValue":{"values":[{"intValue":7},{"doubleValue":0.25}]}}', [7, 0.25]),
    ('{"arrayValue": {"values": [{"doubleValue": 0.5}, {"intValue": "2"}]}}', [0.5, 2]),
    ('{"arrayValue":{"values":[{"stringValue":"3"},{"doubleValue":1}]}}', [3, 1]),
    ('{"arrayValue":{"values":[{"doubleValue":"1.5"}]}}', [1.5]),
    ('{"arrayValue":{"values":[]}}', []),
    ('{"arrayValue":{}}', []),
)


@pytest.mark.parametrize(("text", "numbers"), ARRAYS, ids=range(len(ARRAYS)))
def test_an_array_of_numbers_reads_the_same_however_it_is_written(tmp_path: Path, text: str, numbers: list) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(one_span('{"key":"a","value":' + text + "}"))
    (span,), problems = spans(path)
    assert (span.floats("a").tolist(), problems.told) == (numbers, [])
    assert (span.start_ns, span.end_ns, span.name) == (1, 2, "decode")


def test_arrays_leave_the_text_only_where_all_of_it_are_numbers() -> None:
    text = one_span('{"key":"a","value":{"arrayValue":{"values":[{"doubleValue":0.5},{"stringValue":"x"}]}}}').encode()
    assert taken_out(text) == (text, [])
    numbers = b'{"arrayValue":{"values":[{"intValue":"1"},{"intValue":"2"}]}}'
    assert taken_out(numbers) == (b'{"numbers":0}', [[1, 2]])
    two_in_one = b'{"arrayValue":{"values":[{"intValue":"1,2"}]}}'
    assert taken_out(two_in_one) == (two_in_one, [])


def test_a_string_that_looks_like_an_array_stays_a_string(tmp_path: Path) -> None:
    said = '{"arrayValue":{"values":[{"doubleValue":0.5}]}}'
    path = tmp_path / "a.jsonl"
    path.write_text(one_span('{"key":"a","value":{"stringValue":' + json.dumps(said) + "}}"))
    (span,), _ = spans(path)
    assert span.text("a") == said


@pytest.mark.parametrize(
    "value",
    [
        '{"stringValue":"x"}',
        '{"arrayValue":{"values":[{"stringValue":"x"}]}}',
        '{"arrayValue":3}',
        '{"numbers":4}',
        "7",
    ],
)
def test_an_attribute_of_another_type_is_malformed(tmp_path: Path, value: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(one_span('{"key":"a","value":' + value + "}"))
    (span,), _ = spans(path)
    with pytest.raises(Malformed, match=r"^a is not"):
        span.floats("a")


def test_a_torn_last_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = otlp.line(otlp.root("r", "1"))
    path.write_text(whole + whole[: len(whole) // 2])
    found, problems = spans(path)
    assert len(found) == 1
    assert (problems.num_torn, problems.num_skipped) == (1, 0)
    assert problems.told == [f"{path}:2: the last line ends in the middle, skipped"]


def test_lines_that_are_not_otlp_are_named_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('garbage\n\n{"hello": 1}\n' + otlp.line(otlp.root("r", "1")) + '{"resourceMetrics":[]}\n[5]\n')
    found, problems = spans(path)
    assert [span.text("kvrelay.request.id") for span in found] == ["r"]
    assert problems.told == [
        f"{path}:1: not JSON, skipped",
        f"{path}:3: JSON, but not OTLP: no resourceSpans, skipped",
        f"{path}:6: JSON, but not OTLP: no resourceSpans, skipped",
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"resourceSpans":[3]}',
        '{"resourceSpans":[{"scopeSpans":7}]}',
        '{"resourceSpans":[{"scopeSpans":[{"spans":[3]}]}]}',
        '{"resourceSpans":[{"scopeSpans":[{"spans":[{"name":"x"}]}]}]}',
        '{"resourceSpans":[{"scopeSpans":[{"spans":[{"traceId":"t","spanId":"s","name":"n",'
        '"startTimeUnixNano":"soon","endTimeUnixNano":"1"}]}]}]}',
        "[" * 100_000,
    ],
)
def test_wrong_shapes_inside_are_skipped_and_nothing_falls_over(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n" + otlp.line(otlp.root("r", "1")))
    found, problems = spans(path)
    assert (len(found), problems.num_skipped) == (1, 1)
    assert problems.told[0].startswith(f"{path}:1: ")


def test_many_problems_are_counted_and_some_of_them_told(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x\n" * 1000)
    found, problems = spans(path)
    assert (found, problems.num_skipped, len(problems.told)) == ([], 1000, MAX_PROBLEMS)


def test_a_document_over_many_lines_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(json.loads(otlp.line(otlp.decode("1", [0.5, 1.5], [0, 3]))), indent=2))
    (span,), problems = spans(path)
    assert (span.floats("kvrelay.decode.token_offsets_s").tolist(), problems.told) == ([0.5, 1.5], [])
    assert span.ints("kvrelay.decode.step_ids").tolist() == [0, 3]


def test_a_document_that_is_no_json_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n "resourceSpans": [\n  oh\n')
    assert spans(path) == ([], Problems([f"{path}:3: not JSON, neither the file nor its first line, skipped"], 1, 0))


def test_lines_in_a_file_that_ends_in_json_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(otlp.line(otlp.root("r", "1")) + otlp.line(otlp.root("s", "2")))
    assert [span.text("kvrelay.request.id") for span in spans(path)[0]] == ["r", "s"]


def test_a_folder_is_searched_and_a_file_is_taken_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    inside, other, named = tmp_path / "deep" / "a.jsonl", tmp_path / "notes.txt", tmp_path / "b.json"
    for path in (inside, other, named):
        path.write_text("")
    assert files_of([tmp_path]) == [named, inside]
    assert files_of([other, tmp_path, named]) == [other, named, inside]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"no \.jsonl or \.json file in "):
        files_of([tmp_path])
    with pytest.raises(NotFound, match=r"no such file or folder: .*gone"):
        files_of([tmp_path / "gone"])

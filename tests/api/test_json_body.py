"""Bodies are parsed strictly and in bounded time."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_async.api.json_body import parse_json_object
from metrale_async.api.limits import MAX_JSON_DEPTH, MAX_JSON_VALUES
from metrale_async.errors import InvalidRequestError

TEXT = st.text(st.characters(codec="utf-8"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
)


@given(st.dictionaries(TEXT, JSON, max_size=5), st.booleans())
def test_every_json_object_is_read_as_json_reads_it(value, ascii_only):
    assert parse_json_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_refusal(body):
    with contextlib.suppress(InvalidRequestError):
        assert isinstance(parse_json_object(body), dict)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b"{",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":"\\ud800"}',
        b'{"a":"\xed\xa0\x80"}',
        b'{"a":"\xff"}',
        b'{"a":"\x00"}',
        b'\x00{"a":1}',
        b'{"a":1,}',
        b"{'a':1}",
        b'\xef\xbb\xbf{"a":1}',
    ],
)
def test_what_is_not_a_json_object_in_utf8_is_refused(body):
    with pytest.raises(InvalidRequestError):
        parse_json_object(body)


@pytest.mark.parametrize(
    "body", [b'{"a":1,"a":1}', b'{"x":{"a":1,"b":2,"a":1}}', b'{"x":[1,{"a":1,"\\u0061":2}]}', b'{"a":{},"a":[]}']
)
def test_a_name_that_occurs_twice_in_an_object_is_refused(body):
    with pytest.raises(InvalidRequestError, match="twice"):
        parse_json_object(body)


def test_structure_inside_strings_does_not_count():
    text = '\\"[[[{{{:::,,,' * 100 + "\\"
    assert parse_json_object(json.dumps({"a": text, text: [text]}).encode()) == {"a": text, text: [text]}


@pytest.mark.parametrize(("extra", "accepted"), [(-1, True), (0, True), (1, False)])
def test_nesting_is_bounded(extra, accepted):
    lists = MAX_JSON_DEPTH + extra - 1
    body = b'{"a":' + b"[" * lists + b"]" * lists + b"}"
    if accepted:
        parse_json_object(body)
    else:
        with pytest.raises(InvalidRequestError, match="nested"):
            parse_json_object(body)


@pytest.mark.parametrize(("extra", "accepted"), [(-1, True), (0, True), (1, False)])
def test_the_number_of_values_is_bounded(extra, accepted):
    # One name and two pairs of brackets beside the commas.
    commas = MAX_JSON_VALUES - 5 + extra
    body = b'{"a":[' + b"1," * commas + b"1]}"
    if accepted:
        assert len(parse_json_object(body)["a"]) == commas + 1
    else:
        with pytest.raises(InvalidRequestError, match="more than"):
            parse_json_object(body)


@pytest.mark.parametrize("piece", [b"[", b"{", b'"', b"\\", b'{"a":', b'"",', b"[1,"])
def test_megabytes_of_one_piece_are_refused(piece):
    with pytest.raises(InvalidRequestError):
        parse_json_object(piece * (8 * 2**20 // len(piece)))


def test_quotes_inside_a_string_are_no_values():
    text = '"' * (3 * MAX_JSON_VALUES)
    assert parse_json_object(json.dumps({"code": text}).encode()) == {"code": text}


@pytest.mark.parametrize(("extra", "accepted"), [(-1, True), (0, True), (1, False)])
def test_the_number_of_strings_is_bounded(extra, accepted):
    count = MAX_JSON_VALUES - 4 + extra
    body = b'{"a":[' + b",".join([b'"x"'] * count) + b"]}"
    if accepted:
        assert len(parse_json_object(body)["a"]) == count
    else:
        with pytest.raises(InvalidRequestError, match="more than"):
            parse_json_object(body)

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from metrale_async.text import StopMatcher

letters = st.text(alphabet="ab", max_size=30)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=4)


def specification(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The whole text at once: the first end of a stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], include: bool) -> tuple[str, str | None, list[str]]:
    matcher = StopMatcher(stops, include)
    emitted: list[str] = []
    for piece in pieces:
        result = matcher.push(piece)
        emitted.append(result.text_to_emit)
        if result.matched is not None:
            return "".join(emitted), result.matched, emitted
    emitted.append(matcher.flush())
    return "".join(emitted), None, emitted


@given(text=letters, stops=stop_lists, include=st.booleans(), data=st.data())
def test_the_result_does_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], include: bool, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert run(pieces, stops, include)[:2] == specification(text, stops, include)


@given(text=letters, stops=stop_lists)
def test_nothing_is_held_back_longer_than_it_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    seen = emitted = ""
    for character in text:
        result = matcher.push(character)
        if result.matched is not None:
            return
        seen += character
        emitted += result.text_to_emit
        held = seen[len(emitted) :]
        assert any(stop.startswith(held) for stop in stops)
        assert len(held) < max(map(len, stops))


@given(text=letters, stops=stop_lists)
def test_no_part_of_a_stop_that_matches_is_emitted(text: str, stops: list[str]) -> None:
    joined, matched, _ = run(list(text), stops, False)
    if matched is not None:
        assert text.startswith(joined + matched)


@pytest.mark.parametrize("stops", [[], [""], ["a", ""]])
def test_empty_stops_are_refused(stops: list[str]) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(stops)


def test_stops_of_several_characters_and_scripts() -> None:
    assert run(["Hel", "lo\r", "\nUser", ": hi"], ["\nUser:"], False)[:2] == ("Hello\r", "\nUser:")
    assert run(["日本", "語です。", "次"], ["。"], True)[:2] == ("日本語です。", "。")
